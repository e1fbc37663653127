"""Ranks as threads of this process: quick enough to try every odd size, and debuggable.

They exchange objects through a real rendezvous, encoded as JSON as between processes. The same
exchange between MPI ranks is tested in test_mpi.py.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hvdtrain.keras.data import ShardedInput, ShardPlan, shard_input
from hvdtrain.keras.data.batch_structure import parts
from hvdtrain.keras.data.sharded_input import Pass

__all__ = ["Step", "ThreadCollectives", "flat", "joint", "on_ranks", "read", "shard_on_ranks"]

SEED = 7
TIMEOUT_S = 60.0


class ThreadCollectives:
    """``allgather_object`` between threads; the only operation that sharding needs."""

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


def on_ranks(size: int, function: Callable[[ThreadCollectives], Any]) -> list[Any]:
    """What ``function`` returns or raises on each of ``size`` ranks that run at once."""
    barrier, slots = threading.Barrier(size), [""] * size

    def run(rank: int) -> Any:
        try:
            return function(ThreadCollectives(rank, size, barrier, slots))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def shard_on_ranks(size: int, make: Callable[[int], Any], **options: Any) -> list[ShardedInput]:
    """Each rank's share of what ``make(rank)`` returns: x, or a tuple of positional arguments."""

    def shard(collectives: ThreadCollectives) -> ShardedInput:
        made = make(collectives.rank)
        arguments = made if isinstance(made, tuple) else (made,)
        given = {"seed": SEED, **options}
        plan = ShardPlan(rank=collectives.rank, size=size, collectives=collectives, **given)
        return shard_input(*arguments, plan=plan)

    results = on_ranks(size, shard)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Step:
    """One element of a sharded dataset, its ids (taken from y, or x) as a list."""

    def __init__(self, element: Any) -> None:
        self.batch, rows, joint_rows = element
        self.rows, self.joint_rows = int(rows), int(joint_rows)
        split = parts(self.batch)
        ids = np.asarray(split[1] if len(split) > 1 else split[0])
        assert len(ids) >= 1
        assert self.rows in (0, len(ids))
        self.ids = ids.reshape(len(ids), -1)[: self.rows, 0].astype(int).tolist()


def read(sharded: ShardedInput | Pass, limit: int | None = None) -> list[Step]:
    """The steps of one pass, at most ``limit``."""
    dataset = sharded.dataset if limit is None else sharded.dataset.take(limit)
    return [Step(element) for element in dataset]


def joint(shares: list[ShardedInput], begun: list[Pass] | None = None) -> list[list[int]]:
    """The ids of each joint step, ranks one after the other; checks what steps say of rows.

    Args:
        shares: Of all ranks.
        begun: Their passes, if it is not the whole data that is to be read.
    """
    inputs: list[Any] = begun if begun is not None else shares
    passes = [read(each) for each in inputs]
    lengths = {len(steps) for steps in passes}
    assert len(lengths) == 1, f"ranks have different numbers of steps: {lengths}"
    for each, steps in zip(inputs, passes):
        assert each.steps is None or each.steps == len(steps)
    found = []
    for ranks in zip(*passes):
        ids = [sample for step in ranks for sample in step.ids]
        for share, step in zip(shares, ranks):
            assert step.joint_rows == (len(ids) if share.joint_rows_known else -1)
        found.append(ids)
    return found


def flat(lists: Iterable[list[int]]) -> list[int]:
    """The entries of the lists, one list after the other."""
    return list(itertools.chain.from_iterable(lists))
