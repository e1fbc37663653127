"""Exchange of arrays and objects with every engine."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvdtrain.errors import ConfigurationError
from tests.collectives.engines import DTYPES, EVERY_ENGINE, Subject

pytestmark = EVERY_ENGINE


class Answer:
    """A class that can be pickled, but not converted to JSON."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and other.number == self.number

    __hash__ = None


def _noise(rank: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return random bytes, which include NaNs. For bool, return valid values."""
    generator = np.random.default_rng([rank, *shape, dtype.itemsize])
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(generator.bytes(nbytes), dtype).reshape(shape).copy()


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def test_allgather(subject: Subject) -> None:
    engine = subject.engine
    lengths = {
        "different": [2 * rank + 1 for rank in range(engine.size)],
        "none-from-the-first": [3 * (rank > 0) for rank in range(engine.size)],
        "none-from-the-last": [4 * (rank < engine.size - 1) for rank in range(engine.size)],
        "none-at-all": [0] * engine.size,
        "many": [3000 + rank for rank in range(engine.size)],
    }
    cases = [(dtype, (3,), lengths["different"]) for dtype in DTYPES]
    for row in ((), (2, 5), (0,)):
        cases += [(np.dtype(np.float32), row, counts) for counts in lengths.values()]
    for dtype, row, counts in cases:
        every = [_noise(rank, (count, *row), dtype) for rank, count in enumerate(counts)]
        own = every[engine.rank]
        kept = own.copy()
        result = engine.allgather(own, name="rows")
        assert _same(result, np.concatenate(every))
        assert _same(own, kept), "modified input"


def test_broadcast(subject: Subject) -> None:
    engine = subject.engine
    for root in range(engine.size):
        for dtype in DTYPES:
            for shape in (
                ((), (0, 2), (3, 5), (7000,), (800_000,)) if dtype == np.float32 else ((5,),)
            ):
                array = _noise(engine.rank, shape, dtype)
                kept = array.copy()
                result = engine.broadcast(array, root, name="weights")
                assert _same(result, _noise(root, shape, dtype))
                assert _same(array, kept), "modified input"
                assert not np.shares_memory(result, array)


def test_alltoall(subject: Subject) -> None:
    engine = subject.engine
    size, rank = engine.size, engine.rank
    tables = {
        "even": np.full((size, size), 2),
        "uneven": np.add.outer(np.arange(size), 2 * np.arange(size)),  # rank 0 keeps nothing
        "only-to-the-next": np.roll(np.eye(size, dtype=int), 1, axis=1) * 5,
        "nothing-from-the-last": np.arange(size, 0, -1)[:, None] * np.ones(size, int) - 1,
        "nothing-at-all": np.zeros((size, size), int),
        "many": np.full((size, size), 2000) + np.arange(size),
    }
    for dtype in DTYPES:
        for table in tables.values() if dtype == np.float32 else [tables["uneven"]]:
            every = [_noise(r, (int(table[r].sum()), 3), dtype) for r in range(size)]
            kept = every[rank].copy()
            result, counts = engine.alltoall(every[rank], table[rank].tolist(), name="tokens")
            parts = [np.split(every[r], np.cumsum(table[r])[:-1])[rank] for r in range(size)]
            assert counts == table[:, rank].tolist()
            assert all(isinstance(count, int) for count in counts)
            assert _same(result, np.concatenate(parts))
            assert _same(every[rank], kept), "modified input"


def test_alltoall_without_splits(subject: Subject) -> None:
    engine = subject.engine
    array = np.arange(3 * engine.size) + 100 * engine.rank
    result, counts = engine.alltoall(array)
    assert counts == [3] * engine.size
    columns = np.arange(3 * engine.rank, 3 * engine.rank + 3)
    assert result.tolist() == [x + 100 * rank for rank in range(engine.size) for x in columns]
    if engine.size > 1:
        with pytest.raises(ConfigurationError, match="needs a multiple of"):
            engine.alltoall(np.ones(engine.size + 1 + engine.size % 2))


def test_invalid_arguments(subject: Subject) -> None:
    engine = subject.engine
    rows = np.ones((3, 2))
    zeros = [0] * (engine.size - 1)
    for splits in ([4, *zeros], [2, *zeros], [3, *zeros, 0], [-1, 4, *zeros[1:]]):
        with pytest.raises(ConfigurationError, match=r"splits must be.*sum of 3 rows"):
            engine.alltoall(rows, splits)
    for root in (-1, engine.size):
        with pytest.raises(
            ConfigurationError, match=f"root must be between 0 and {engine.size - 1}, got {root}"
        ):
            engine.broadcast(rows, root)
        with pytest.raises(ConfigurationError, match=f"got {root}"):
            engine.broadcast_object(1, root)
    for operation in (engine.allgather, engine.reduce_scatter, engine.alltoall):
        with pytest.raises(ConfigurationError, match="got a scalar"):
            operation(np.array(1.0))
    for operation in (engine.allgather, engine.broadcast, engine.alltoall):
        with pytest.raises(ConfigurationError, match="got dtype object"):
            operation(np.array([{}] * engine.size))
    engine.barrier(name="after")


def test_barrier_waits_for_all_ranks(subject: Subject) -> None:
    engine = subject.engine
    for late in range(engine.size):
        engine.barrier(name="start")
        time.sleep(0.05 * (engine.rank == late))
        # All ranks use the same clock.
        entered = time.monotonic()
        engine.barrier(name=f"rank {late} is late")
        left = time.monotonic()
        assert left >= engine.allgather(np.array([entered])).max()


JSON = [None, True, 17, 2.5, "grüße …", [], {}, {"a": [1, {"b": None}]}, "x" * 100_000]


def test_objects_as_json(subject: Subject) -> None:
    engine = subject.engine
    for obj in JSON:
        own = [engine.rank, obj]
        every = engine.allgather_object(own, name="settings")
        assert every == [[rank, obj] for rank in range(engine.size)]
        for root in range(engine.size):
            sent = own if engine.rank == root else object()  # only the root sends
            assert engine.broadcast_object(sent, root, name="settings") == [root, obj]


def test_objects_as_pickle(subject: Subject) -> None:
    engine = subject.engine
    every = engine.allgather_object(Answer(engine.rank), codec="pickle")
    assert every == [Answer(rank) for rank in range(engine.size)]
    sent = {(1, 2): {3, 4}, "array": np.arange(5)} if engine.rank == engine.size - 1 else None
    received = engine.broadcast_object(sent, engine.size - 1, codec="pickle")
    assert received[(1, 2)] == {3, 4}
    assert received["array"].tolist() == [0, 1, 2, 3, 4]


def test_objects_that_json_can_not_represent(subject: Subject) -> None:
    engine = subject.engine
    for obj in (Answer(1), {1, 2}, b"bytes", np.float32(1), {(1, 2): 3}):
        kind = type(obj).__name__
        with pytest.raises(ConfigurationError, match=rf"type {kind} can't .* codec='pickle'"):
            engine.allgather_object(obj)
    with pytest.raises(ConfigurationError, match=r"'json' or 'pickle', got 'xml'"):
        engine.broadcast_object({}, codec="xml")
    text = engine.allgather_object("ü" * (1000 * engine.rank))
    assert text == ["ü" * (1000 * rank) for rank in range(engine.size)]


def test_different_operations_in_sequence(subject: Subject) -> None:
    """The operations share memory and communicators."""
    engine = subject.engine
    size, rank = engine.size, engine.rank
    ranks = sum(range(size))
    for turn in range(12):
        large = engine.allreduce(np.full(4000, rank + turn, np.float32), name="large")
        gathered = engine.allgather(np.full((rank, 2), turn))
        small = engine.allreduce(np.array(turn + rank), "max")
        root = engine.broadcast(np.array([rank]), turn % size)
        scattered = engine.reduce_scatter(np.ones((size, 2)) * turn)
        exchanged, _ = engine.alltoall(np.full(size, rank))
        objects = engine.allgather_object({"turn": turn})
        engine.barrier()
        assert (large == size * turn + ranks).all()
        assert (gathered == turn).all()
        assert gathered.shape == (ranks, 2)
        assert small == turn + size - 1
        assert root.tolist() == [turn % size]
        assert (scattered == size * turn).all()
        assert exchanged.tolist() == list(range(size))
        assert objects == [{"turn": turn}] * size
