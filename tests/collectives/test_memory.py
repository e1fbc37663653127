"""The memory of results, which belongs to the caller until the caller drops the result."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np

from tests.collectives.engines import CASES, EVERY_ENGINE, Subject, on_engines

PAGE_BYTES = 4096


def _mixed(engine, turn: int) -> list[np.ndarray]:
    return [
        np.full(shape, engine.rank + turn, np.float32) for shape in ((300,), (7, 11), (), (2500,))
    ]


@EVERY_ENGINE
def test_results_outlive_later_operations(subject: Subject) -> None:
    engine = subject.engine
    ranks = sum(range(engine.size))
    held = [engine.grouped_allreduce(_mixed(engine, 0))]
    held += [[engine.allgather(np.full(50, 1.0))], [engine.broadcast(np.full(50, 2.0))]]
    held += [[engine.reduce_scatter(np.full(50, 3.0))], [engine.alltoall(np.ones(engine.size))[0]]]
    kept = [[array.copy() for array in group] for group in held]
    for turn in range(1, 21):
        result = engine.grouped_allreduce(_mixed(engine, turn))
        engine.allgather(np.full(50, 9.0))
        for array in result:
            assert (array == engine.size * turn + ranks).all()
        if turn % 2:
            held.append(result)
            kept.append([array.copy() for array in result])
    for group, copies in zip(held, kept):
        for array, copy in zip(group, copies):
            assert array.tobytes() == copy.tobytes()


@EVERY_ENGINE
def test_writing_to_a_result_changes_no_other_array(subject: Subject) -> None:
    engine = subject.engine
    array = np.arange(4.0)
    first = [
        engine.allreduce(array),
        engine.broadcast(array),
        engine.allgather(array),
        engine.reduce_scatter(np.tile(array, engine.size)),
        engine.alltoall(np.tile(array, engine.size))[0],
    ]
    again = engine.allreduce(array)
    for result in first:
        result[...] = -1
    engine.barrier()
    assert array.tolist() == [0, 1, 2, 3]
    assert again.tolist() == [0, engine.size, 2 * engine.size, 3 * engine.size]


@EVERY_ENGINE
def test_dropped_memory_is_reused(subject: Subject) -> None:
    engine = subject.engine
    addresses = set()
    for turn in range(10):
        results = engine.grouped_allreduce(_mixed(engine, turn))
        if turn:
            addresses.add(tuple(array.ctypes.data for array in results))
        assert all(array.ctypes.data % 64 == 0 for array in results), "TensorFlow would copy"
        del results
    assert len(addresses) == 1


@on_engines([case for case in CASES if len(case.hosts) in (1, 2)], "subject")
def test_memory_does_not_grow(subject: Subject) -> None:
    engine = subject.engine
    array = np.ones(16 * 1024, np.float32)

    def run(turns: int) -> None:
        for turn in range(turns):
            engine.grouped_allreduce([array, array[:1000]], "average", name="gradients")
            engine.allreduce(np.array(turn))
            if turn % 5 == 0:
                engine.allgather(array)
                engine.broadcast(array)
                engine.allgather_object({"turn": turn})

    run(50)
    gc.collect()
    before = _resident_bytes()
    run(500)
    gc.collect()
    assert _resident_bytes() - before < 1 << 20, "500 results have 33 MB"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@EVERY_ENGINE
def test_results_held_in_another_thread(subject: Subject) -> None:
    """TensorFlow drops results from its own threads."""
    engine = subject.engine
    stop = threading.Event()
    held: list[list[np.ndarray]] = []

    def drop() -> None:
        while not stop.wait(0.001):
            if len(held) > 3:
                del held[0]

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        ranks = sum(range(engine.size))
        for turn in range(40):
            results = engine.grouped_allreduce(_mixed(engine, turn))
            assert all((array == engine.size * turn + ranks).all() for array in results)
            held.append(results)
            for group in list(held):
                assert len({float(array.flat[0]) for array in group}) == 1
    finally:
        stop.set()
        thread.join(60)
