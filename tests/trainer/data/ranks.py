"""Ranks as threads of this process, which is fast and easy to debug.

They exchange objects as JSON. test_mpi.py tests the same exchange between MPI ranks.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hvdtrain.trainer.data import ShardedInput, ShardPlan, shard_input
from hvdtrain.trainer.data.batch_structure import batch_parts
from hvdtrain.trainer.data.sharded_input import Pass

__all__ = ["Step", "ThreadEngine", "flat", "joint", "on_ranks", "read", "shard", "shard_on_ranks"]

SEED = 7
TIMEOUT_S = 60.0


class ThreadEngine:
    """An engine for threads. It only has ``allgather_object``, which is all that sharding needs."""

    survives_losses = False

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[str]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._slots = slots

    def allgather_object(self, obj: Any, *, name: str = "", codec: str = "json") -> list[Any]:
        assert name
        assert codec == "json"
        self._slots[self.rank] = json.dumps([name, obj])
        self._barrier.wait(TIMEOUT_S)
        entries = [json.loads(slot) for slot in self._slots]
        self._barrier.wait(TIMEOUT_S)
        assert {entry[0] for entry in entries} == {name}
        return [entry[1] for entry in entries]


def on_ranks(size: int, function: Callable[[ThreadEngine], Any]) -> list[Any]:
    """Run ``function`` on all ranks at once, and return its results and exceptions."""
    barrier, slots = threading.Barrier(size), [""] * size

    def run(rank: int) -> Any:
        try:
            return function(ThreadEngine(rank, size, barrier, slots))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def shard(engine: Any, x: Any, **options: Any) -> ShardedInput:
    """Return a rank's share of ``x``, or of a tuple (x, y, sample_weight)."""
    options = {"seed": SEED, **options}
    plan = ShardPlan(rank=engine.rank, size=engine.size, collectives=engine, **options)
    return shard_input(*(x if isinstance(x, tuple) else (x,)), plan=plan)


def shard_on_ranks(size: int, make: Callable[[int], Any], **options: Any) -> list[ShardedInput]:
    """Return each rank's share of ``make(rank)``. The options are passed to ``shard``."""
    results = on_ranks(size, lambda engine: shard(engine, make(engine.rank), **options))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Step:
    """An element of a sharded dataset. Its ids are the values of y, or of x without targets."""

    def __init__(self, element: Any) -> None:
        self.batch, rows, joint_rows = element
        self.rows, self.joint_rows = int(rows), int(joint_rows)
        split = batch_parts(self.batch)
        ids = np.asarray(split[1] if len(split) > 1 else split[0])
        assert len(ids) >= 1
        assert self.rows in (0, len(ids))
        self.ids = ids.reshape(len(ids), -1)[: self.rows, 0].astype(int).tolist()


def read(sharded: ShardedInput | Pass, limit: int | None = None) -> list[Step]:
    """Return up to ``limit`` steps of a pass."""
    return [Step(element) for element in itertools.islice(sharded.dataset, limit)]


def joint(shares: list[ShardedInput], passes: list[Pass] | None = None) -> list[list[int]]:
    """Return the ids of each joint step, and check the number of steps and ``joint_rows``.

    Args:
        shares: The shares of all ranks.
        passes: The passes of all ranks; whole passes by default.
    """
    inputs: list[Any] = shares if passes is None else passes
    steps_by_rank = [read(each) for each in inputs]
    lengths = {len(steps) for steps in steps_by_rank}
    assert len(lengths) == 1, f"ranks have different numbers of steps: {lengths}"
    assert {each.steps for each in inputs} <= {None, *lengths}
    joint_steps = []
    for ranks in zip(*steps_by_rank):
        ids = [sample for step in ranks for sample in step.ids]
        for share, step in zip(shares, ranks):
            assert step.joint_rows == (len(ids) if share.joint_rows_known else -1)
        joint_steps.append(ids)
    return joint_steps


def flat(lists: Iterable[list[int]]) -> list[int]:
    """Concatenate lists."""
    return list(itertools.chain.from_iterable(lists))
