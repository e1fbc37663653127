from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives import create
from hvdtrain.config import Settings
from hvdtrain.errors import DataError
from hvdtrain.keras.data import ShardPlan, shard_input
from tests.keras.data.ranks import read, shard_on_ranks


class DataLoader:
    """Not torch's: Keras looks for the module as well."""


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (DataLoader(), r"test_input_kinds\.DataLoader; pass .*PyDataset"),
        (None, "x=None"),
        ("text", r"unsupported type, got builtins\.str; pass .*tf\.data\.Dataset"),
        ([1, 2, 3], r"builtins\.list"),
        (iter([np.zeros((4, 2))]), r"list_iterator; pass .*a generator"),
    ],
)
def test_other_inputs(x, found: str) -> None:
    with pytest.raises(DataError, match=found):
        shard_on_ranks(2, lambda _: (x,))


def test_other_kind_on_a_rank() -> None:
    array = np.zeros((4, 2), "float32")

    def make(rank: int):
        return tf.data.Dataset.from_tensor_slices(array).batch(2) if rank else array

    with pytest.raises(DataError, match=r"kind of input is arrays on rank 0, a tf\.data\.Dataset"):
        shard_on_ranks(2, make, batch_size=2)


def test_other_arguments_on_a_rank() -> None:
    from tests.keras.data.ranks import on_ranks

    def shard(collectives):
        options = {"batch_size": 2 + collectives.rank, "steps": 3 + collectives.rank}
        plan = ShardPlan(
            **options,
            rank=collectives.rank,
            size=2,
            seed=collectives.rank,
            collectives=collectives,
        )
        return shard_input(np.zeros((40, 2)), plan=plan)

    for result in on_ranks(2, shard):
        assert isinstance(result, DataError)
        for name in ("steps is 3", "batch_size is 2", "seed is 0"):
            assert name in str(result)


def test_alone_with_the_real_engine() -> None:
    topology = Topology(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher="none")
    ids = np.arange(10)
    collectives = create(topology, Settings())
    plan = ShardPlan(batch_size=4, rank=0, size=1, seed=0, collectives=collectives)
    share = shard_input(ids.astype("float32"), ids, plan=plan)
    assert [step.ids for step in read(share)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    share.on_epoch_begin(0)
    share.verify()
    share.on_epoch_end()
