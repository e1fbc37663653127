from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives import create
from hvdtrain.config import Settings
from hvdtrain.errors import DataError
from tests.trainer.data.ranks import on_ranks, read, shard, shard_on_ranks


class DataLoader:
    """Has only the name of torch's."""


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (DataLoader(), r"test_input_kinds\.DataLoader; pass .*PyDataset"),
        (None, "x=None"),
        ("text", r"unsupported type, got builtins\.str; pass .*tf\.data\.Dataset"),
        ([1, 2, 3], r"builtins\.list"),
        (iter([np.zeros((4, 2))]), r"list_iterator; pass .*a generator"),
    ],
)
def test_an_unsupported_input_is_an_error(x, message: str) -> None:
    with pytest.raises(DataError, match=message):
        shard_on_ranks(2, lambda _: (x,))


def test_a_different_kind_of_input_on_one_rank_is_an_error() -> None:
    array = np.zeros((4, 2), "float32")

    def make(rank: int):
        return tf.data.Dataset.from_tensor_slices(array).batch(2) if rank else array

    with pytest.raises(DataError, match=r"kind of input is arrays on rank 0, a tf\.data\.Dataset"):
        shard_on_ranks(2, make, batch_size=2)


def test_different_arguments_on_one_rank_are_an_error_on_all() -> None:
    def run(engine):
        options = {"batch_size": 2 + engine.rank, "steps": 3 + engine.rank, "seed": engine.rank}
        return shard(engine, np.zeros((40, 2)), **options)

    for result in on_ranks(2, run):
        assert isinstance(result, DataError)
        for name in ("steps is 3", "batch_size is 2", "seed is 0"):
            assert name in str(result)


def test_a_single_rank_with_a_real_engine() -> None:
    topology = Topology(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher="none")
    ids = np.arange(10)
    share = shard(create(topology, Settings()), (ids.astype("float32"), ids), batch_size=4)
    assert [step.ids for step in read(share)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    share.on_epoch_begin(0)
    share.verify()
    share.on_epoch_end()
