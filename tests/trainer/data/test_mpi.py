"""Sharding between real MPI ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain import world
from hvdtrain.errors import DataError
from hvdtrain.trainer.data import ShardedInput
from tests.trainer.data.ranks import SEED, flat, read, shard
from tests.trainer.data.test_pydataset import Batches

pytestmark = pytest.mark.ranks(3)


def _shard(*x, **options) -> ShardedInput:
    hvdtrain.init()
    return shard(world.collectives(), x, **options)


def _joint(share: ShardedInput) -> list[list[int]]:
    """Return the ids of each joint step."""
    steps = [step.ids for step in read(share)]
    ranks = world.collectives().allgather_object(steps, name="test")
    assert len({len(steps) for steps in ranks}) == 1
    return [flat(ids) for ids in zip(*ranks)]


def test_arrays() -> None:
    ids = np.arange(47)
    share = _shard(ids.astype("float32"), ids, batch_size=4, shuffle=True)
    for epoch in range(2):
        share.on_epoch_begin(epoch)
        order = np.random.default_rng([SEED, epoch]).permutation(47).tolist()
        joint_batch = 4 * hvdtrain.size()
        assert _joint(share) == [order[i : i + joint_batch] for i in range(0, 47, joint_batch)]
        share.on_epoch_end()


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.data.Dataset.range(47).shuffle(47, seed=1).batch(4),
        lambda: Batches(47, 4, workers=2),
    ],
)
def test_batches(make) -> None:
    share = _shard(make(), shuffle=True)
    for epoch in range(2):
        share.on_epoch_begin(epoch)
        assert sorted(flat(_joint(share))) == list(range(47))
        share.verify()
        share.on_epoch_end()


def test_presharded() -> None:
    hvdtrain.init()
    ids = np.arange(5 + 2 * hvdtrain.rank()) + 100 * hvdtrain.rank()
    share = _shard(ids.astype("float32"), ids, batch_size=2, presharded=True)
    assert sorted(flat(_joint(share))) == [
        100 * r + i for r in range(hvdtrain.size()) for i in range(5 + 2 * r)
    ]


def test_a_difference_is_an_error_on_every_rank() -> None:
    hvdtrain.init()
    last = hvdtrain.size() - 1
    with pytest.raises(DataError, match=rf"number of samples is .* 9 on rank {last}"):
        _shard(np.zeros((10 - (hvdtrain.rank() == last), 2)), batch_size=2)
    with pytest.raises((DataError, ValueError), match=r"cardinality"):
        _shard(np.zeros((10, 2)), np.zeros(10 - (hvdtrain.rank() == last)), batch_size=2)
    share = _shard(tf.data.Dataset.range(1000).shuffle(1000, seed=1 + hvdtrain.rank()).batch(10))
    read(share, limit=1)
    with pytest.raises(DataError, match="first joint step"):
        share.verify()
    world.collectives().barrier(name="test")
