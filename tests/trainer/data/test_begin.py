"""Passes that start at any position, for every kind of input."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdtrain.data.partition import Position
from hvdtrain.errors import DataError
from hvdtrain.trainer.data import ShardedInput
from hvdtrain.trainer.data.batch_structure import present_leaves
from hvdtrain.trainer.data.sharded_input import Pass
from tests.trainer.data.ranks import flat, joint, on_ranks, read, shard, shard_on_ranks
from tests.trainer.data.test_pydataset import Batches, Reshuffled

# Each test reads for some tenths of a second.
pytestmark = pytest.mark.slow

ROWS = 47
EPOCH = 2


def _tf_dataset() -> Any:
    """Return ``tf.data.Dataset``. Other backends run the other tests without TensorFlow."""
    import tensorflow as tf

    return tf.data.Dataset


def _arrays(_: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((ROWS, 2), "float32"), np.arange(ROWS)


def _pipeline(_: int) -> Any:
    return _tf_dataset().range(ROWS).batch(4)


def _shuffled(_: int) -> Any:
    dataset = _tf_dataset().range(ROWS).shuffle(ROWS, seed=3).batch(4).prefetch(2)
    return dataset.map(lambda ids: ({"a": ids, "b": None}, ids))


def _unknown(_: int) -> Any:
    return _tf_dataset().range(ROWS + 5).filter(lambda i: i < ROWS).batch(4)


def _pydataset(_: int) -> Batches:
    return Batches(ROWS, 4)


def _threads(_: int) -> Batches:
    return Batches(ROWS, 4, workers=3)


more, slow = pytest.mark.more, pytest.mark.slow
KINDS = [
    pytest.param(_arrays, {"batch_size": 4, "shuffle": True}, id="arrays"),
    pytest.param(_arrays, {"batch_size": 4}, id="arrays-in-order", marks=more),
    pytest.param(
        _arrays, {"batch_size": 4, "shuffle": "batch"}, id="arrays-within-batches", marks=more
    ),
    pytest.param(_shuffled, {"class_weight": None}, id="pipeline-that-shuffles", marks=slow),
    pytest.param(_unknown, {}, id="pipeline-of-unknown-length", marks=[slow, more]),
    pytest.param(_pydataset, {"shuffle": True}, id="pydataset"),
    pytest.param(_threads, {}, id="pydataset-threads", marks=more),
]
kinds = pytest.mark.parametrize(("make", "options"), KINDS)
"""Runs a test with each kind of input."""


def _begin(shares: list[ShardedInput], position: Position, **options: Any) -> list[Pass]:
    return [share.begin(position, **options) for share in shares]


def _read_epochs(size: int, make: Callable[[int], Any], options: dict) -> list[list[int]]:
    """Return the joint steps of epoch EPOCH, after the earlier epochs."""
    shares = shard_on_ranks(size, make, **options)
    for epoch in range(EPOCH + 1):
        on_ranks(size, lambda ranks, e=epoch: shares[ranks.rank].on_epoch_begin(e))
        steps = joint(shares)
    return steps


@kinds
def test_a_pass_from_the_start_equals_the_dataset(make, options) -> None:
    expected = _read_epochs(3, make, options)
    shares = shard_on_ranks(3, make, **options)
    for epoch in range(EPOCH + 1):
        passes = _begin(shares, Position(epoch=epoch))
        steps = joint(shares, passes)
    assert steps == expected
    for share, begun in zip(shares, passes):
        assert begun.steps == share.steps
        assert _shapes(begun) == _shapes(share)


def _shapes(data: ShardedInput | Pass) -> list[Any]:
    leaves = present_leaves(data.dataset.element_spec.batch)
    return [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]


@kinds
def test_the_same_number_of_ranks_resumes_with_the_next_batches(make, options) -> None:
    size = 2
    expected = _read_epochs(size, make, options)
    for done in {1, len(expected) - 1}:
        position = shard_on_ranks(size, make, **options)[0].begin(Position(epoch=EPOCH)).after(done)
        shares = shard_on_ranks(size, make, **options)
        assert joint(shares, _begin(shares, position)) == expected[done:]


@kinds
def test_a_different_number_of_ranks_reads_the_rest_once_and_in_order(make, options) -> None:
    expected = flat(_read_epochs(4, make, options))
    position, ids = Position(epoch=EPOCH), []
    for size, steps in ((4, 2), (3, 1), (1, 100)):
        shares = shard_on_ranks(size, make, **options)
        for share in shares:
            share.catch_up(epochs=EPOCH, passes=EPOCH)
        passes = _begin(shares, position)
        ids += flat(joint(shares, passes)[:steps])
        position = passes[0].after(steps)
    assert ids == expected
    assert sorted(ids) == list(range(ROWS))


@kinds
def test_the_units_of_a_lost_rank_come_first(make, options) -> None:
    expected = _read_epochs(3, make, options)
    begun = shard_on_ranks(3, make, **options)[0].begin(Position(epoch=EPOCH))
    # Rank 1 was lost in the second step, which no other rank had completed.
    lost = [unit for rank in range(3) for unit in begun.share(1, rank)]
    assert len(lost) == begun.joint.units_in(2) - begun.joint.units_in(1)
    position = begun.after(2).missing(begun.position.places(begun.share(1, 1)))
    shares = shard_on_ranks(2, make, **options)
    ids = flat(joint(shares, _begin(shares, position)))
    assert ids == expected[1][4:8] + flat(expected[2:])
    assert sorted(ids + expected[0] + expected[1][:4] + expected[1][8:]) == list(range(ROWS))


@kinds
def test_remaining_ranks_divide_the_rest_of_the_data(make, options) -> None:
    later = _read_epochs(2, make, options)

    def train(engine) -> Any:
        share = shard(engine, make(0), **options)
        begun = share.begin(Position(epoch=EPOCH - 1), repeatable=True)
        before = [step.ids for step in read(begun, limit=2)]
        position = begun.after(2).missing(begun.position.places(begun.share(1, 2)))
        return share, before, position

    trained: list[Any] = on_ranks(3, train)
    done = flat(flat(ranks) for ranks in zip(*(before for _, before, _ in trained)))
    del done[-4:]  # the second step of rank 2 is lost
    for _ in range(2):  # a rank may be lost before the first step
        shares = [
            share.reshard(rank=rank, size=2) for rank, (share, _, _) in enumerate(trained[:2])
        ]
        passes = _begin(shares, trained[0][2], repeatable=True)
        rest = flat(joint(shares, passes))
    assert sorted(done + rest) == list(range(ROWS))
    if "batch" not in options.values():  # with shuffle="batch", the order differs
        assert joint(shares, _begin(shares, Position(epoch=EPOCH))) == (
            later if make is not _shuffled else _second_pass(make, options)
        )


def _second_pass(make, options) -> list[list[int]]:
    """Return the second pass of a process that starts with epoch EPOCH - 1."""
    shares = shard_on_ranks(2, make, **options)
    joint(shares)
    return joint(shares)


def test_passes_over_arrays_of_the_same_size_share_a_dataset() -> None:
    def share() -> ShardedInput:
        return shard_on_ranks(1, _arrays, batch_size=4, shuffle=True)[0]

    kept = share()
    positions = [Position(epoch=0), Position(epoch=1), Position(epoch=1, start=8)]
    positions += [Position(epoch=2, start=8), Position(epoch=3)]
    datasets, orders = [], []
    for position in positions:
        begun = kept.begin(position)
        datasets.append(begun.dataset)
        orders.append([step.ids for step in read(begun)])
        assert orders[-1] == [step.ids for step in read(share().begin(position))]
    shared = [one is other for one, other in itertools.pairwise(datasets)]
    assert shared == [True, False, True, False]
    assert orders[0] != orders[1] != orders[4]


class _EndlessBatches(Batches):
    @property
    def num_batches(self):
        return None

    def __getitem__(self, index: int):
        return np.zeros((2, 1)), np.array([2 * index, 2 * index + 1])


@pytest.mark.parametrize(
    "make",
    [
        lambda _: _EndlessBatches(1),
        lambda _: _tf_dataset().range(0, 1 << 40).repeat().batch(2),
    ],
)
def test_endless_input_resumes_at_any_position(make) -> None:
    position = Position(epoch=0, start=1000, missed=(3, 7))
    shares = shard_on_ranks(2, make, steps=5)
    begun = _begin(shares, position)
    assert begun[0].steps is None
    steps = [read(each, limit=3) for each in begun]
    ids = [step.ids for ranks in zip(*steps) for step in ranks]
    assert ids == [[6, 7], [14, 15], *([2000 + i, 2001 + i] for i in range(0, 8, 2))]
    assert begun[0].after(3) == Position(epoch=0, start=1004, joint_batch=2)


def test_an_endless_shuffle_continues_its_order() -> None:
    def make(_: int) -> Any:
        return _tf_dataset().range(10).shuffle(10, seed=1).repeat().batch(2)

    expected = [step.ids for step in read(shard_on_ranks(1, make, steps=5)[0], limit=20)]
    begun = shard_on_ranks(1, make, steps=5)[0].begin(Position(epoch=0, start=13))
    assert [step.ids for step in read(begun, limit=7)] == expected[13:]


# An empty PyDataset is an error.
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        *(("arrays", (5, 9, 1)), ("arrays", (0, 4, 4))),
        *(("pipeline", (5, 9, 1)), ("pipeline", (0, 4, 4))),
        ("pydataset", (5, 9, 1)),
    ],
)
def test_presharded_data_is_used_once_and_resumes_at_any_position(
    kind: str, rows: tuple[int, ...]
) -> None:
    def make(rank: int):
        ids = np.arange(rows[rank]) + 100 * rank
        if kind == "arrays":
            return np.zeros((rows[rank], 1), "float32"), ids
        if kind == "pipeline":
            return _tf_dataset().from_tensor_slices(ids).batch(2)
        batches = Batches(rows[rank])
        batches.order = ids
        return batches

    options = {"presharded": True, "batch_size": 2 if kind == "arrays" else None}
    expected = joint(shard_on_ranks(3, make, **options))
    assert len(expected) == -(-max(rows) // 2)
    ids = [100 * rank + i for rank in range(3) for i in range(rows[rank])]
    assert sorted(flat(expected)) == ids
    for done in range(len(expected) + 1):
        shares = shard_on_ranks(3, make, **options)
        position = shares[2].begin(Position(epoch=0)).after(done)
        assert position == shares[0].begin(Position(epoch=0)).after(done)
        assert joint(shares, _begin(shares, position, ranks=3)) == expected[done:]


def test_presharded_data_needs_the_same_number_of_ranks() -> None:
    share = shard_on_ranks(2, _arrays, batch_size=4, presharded=True)[0]
    with pytest.raises(DataError, match=r"was 3, got 2\. .*presharded=True.*Start 3 ranks"):
        share.begin(Position(epoch=0), ranks=3)
    with pytest.raises(DataError, match="was 2, got 1"):
        share.reshard(rank=0, size=1)
    with pytest.raises(DataError, match="presharded=True"):
        share.begin(Position(epoch=0)).share(0, 1)
    with pytest.raises(DataError, match="presharded=True"):
        share.begin(Position(epoch=0, start=8, missed=(2,)))
    shard_on_ranks(2, _arrays, batch_size=4)[0].begin(Position(epoch=0), ranks=3)


def test_presharded_data_without_a_batch_size_cant_resume_within_an_epoch() -> None:
    share = shard_on_ranks(2, _arrays, steps=3, presharded=True)[0]
    assert share.begin(Position(epoch=1)).dataset is not None
    with pytest.raises(DataError, match="Pass batch_size"):
        share.begin(Position(epoch=1, start=16)).dataset  # noqa: B018


@pytest.mark.parametrize(
    ("make", "units", "name"),
    [(_arrays, 47, "samples"), (_pipeline, 12, "batches"), (_pydataset, 12, "batches")],
)
def test_a_position_after_the_end_is_an_error(make, units: int, name: str) -> None:
    share = shard_on_ranks(2, make, batch_size=4)[0]
    assert share.begin(Position(epoch=0, start=units)).steps == 0
    with pytest.raises(DataError, match=rf"has {units} {name}, .*after {units + 1}"):
        share.begin(Position(epoch=0, start=units + 1))


def test_a_pydataset_that_shuffles_its_batches_catches_up() -> None:
    def uninterrupted(engine) -> list[list[int]]:
        share = shard(engine, Reshuffled(np.random.default_rng(5)), trains=True)
        for epoch in range(EPOCH + 1):
            share.on_epoch_begin(epoch)
            steps = [step.ids for step in read(share)]
            share.on_epoch_end()
        return steps

    def resumed(engine) -> list[list[int]]:
        share = shard(engine, Reshuffled(np.random.default_rng(5)), trains=True)
        share.catch_up(epochs=EPOCH, passes=EPOCH)
        share.on_epoch_begin(EPOCH)
        return [step.ids for step in read(share.begin(Position(epoch=EPOCH, start=4)))]

    expected = on_ranks(2, uninterrupted)
    assert on_ranks(2, resumed) == [steps[2:] for steps in expected]
