"""A program whose ranks die: operations of all kinds, and an account of what each gave.

    mpirun -np 4 python -m tests.collectives.survivors '{"kind": "mpi", "deaths": ...}'

Rank r contributes the bit 1 << r everywhere, so that a result tells who had a part in it. Each rank
that comes to the end writes a JSON file into the plan's folder: for every operation the members it
was done with, and a digest of the result where that is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import exit_hooks
from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.mpi import MpiTransport
from hvdtrain.collectives.mpi_start import start_mpi
from hvdtrain.collectives.shared_memory import SharedMemoryTransport
from tests.collectives.engines import FAR

__all__ = ["Death", "Plan"]

ROWS = 12
# Above the bits of the ranks: which row it is.
ROW = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Death:
    """How a rank dies.

    ``after_s`` after it began; or when the method ``where`` of its engine, or of what the engine
    is made of, is called for the ``call``-th time.
    """

    rank: int
    after_s: float | None = None
    where: str = ""
    call: int = 1
    by: int = int(signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the program does.

    ``kind`` is that of the engine, or "arena": shared memory with all results in its arena;
    ``hosts`` holds the pretended host of each rank.
    """

    folder: str
    kind: str
    hosts: tuple[int, ...]
    deaths: tuple[Death, ...]
    operations: int = 100
    items: int = 3000
    chunk_bytes: int = 4096
    pause_s: float = 0.0
    min_np: int = 1
    timeout_s: float = 60.0

    def to_json(self) -> str:
        """What ``from_json`` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = json.loads(text)
        deaths = tuple(Death(**death) for death in values.pop("deaths"))
        return cls(deaths=deaths, **{**values, "hosts": tuple(values["hosts"])})


def main(plan: Plan) -> None:
    """Run this rank's part."""
    mpi = start_mpi(read_topology(os.environ))
    comm = mpi.COMM_WORLD
    host = comm.Split(plan.hosts[comm.Get_rank()], comm.Get_rank())
    kind = MpiTransport if plan.kind == "mpi" else SharedMemoryTransport
    transport: Any = kind(mpi, comm, host, plan.chunk_bytes, plan.timeout_s, plan.min_np)
    if plan.kind == "arena":
        transport.least_in_arena = 0
    # What fits into a chunk takes one round.
    transport._measure_link = lambda comm: FAR
    engine = Engine(transport)
    exit_hooks.install(engine)
    # Open MPI crashes where a rank dies while others still set up a communicator.
    engine.barrier()
    me = engine.rank
    for death in plan.deaths:
        if death.rank == me:
            _prepare(death, engine)
    done: list[Any] = []
    longest_s = 0.0
    for number in range(plan.operations):
        begun = time.monotonic()
        name, operation = _OPERATIONS[number % len(_OPERATIONS)]
        members, digest = operation(engine, me, number, plan)
        if members is not None and name != "average":  # that is two operations
            assert members == list(engine.contributed), (name, members, engine.contributed)
        done.append([name, members, digest])
        longest_s = max(longest_s, time.monotonic() - begun)
        time.sleep(plan.pause_s)
    account = {
        "me": me,
        "done": done,
        "members": engine.members,
        "rank": engine.rank,
        "generation": engine.generation,
        "too_few": str(engine.too_few) if engine.too_few else None,
        "longest_s": longest_s,
    }
    Path(plan.folder, f"{me}.json").write_text(json.dumps(account))


def _prepare(death: Death, engine: Any) -> None:
    def die() -> None:
        os.kill(os.getpid(), death.by)

    if death.after_s is not None:
        threading.Timer(death.after_s, die).start()
        return
    transport = engine.transport
    owners = (
        *(transport, transport.recovery, transport.detector),
        *(getattr(transport, "_cross", None), transport._direct, transport._small),
        engine,
    )
    # Of the class, as recovery makes some of the objects anew.
    owner = next(type(part) for part in owners if hasattr(part, death.where))
    original = getattr(owner, death.where)
    calls = 0

    @functools.wraps(original)
    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == death.call:
            die()
        return original(*args, **options)

    setattr(owner, death.where, dying)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def _bits(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def _allreduce(engine: Any, me: int, number: int, plan: Plan) -> tuple[list[int], str]:
    result = engine.allreduce(np.full(plan.items, 1 << me, np.int64), name=f"number {number}")
    assert (result == result[0]).all()
    return _bits(int(result[0])), _digest(result)


def _average(engine: Any, me: int, number: int, plan: Plan) -> tuple[list[int], str]:
    mine = np.full(plan.items, 1 << me, np.float32)
    total, average = engine.grouped_allreduce([mine], name="sum"), None
    average = engine.grouped_allreduce([mine, mine[:7]], "average", require_finite=True)
    members = _bits(int(total[0][0]))
    assert len({float(value) for part in average for value in part}) == 1
    # The second operation may have been done by fewer.
    kept = engine.contributed
    expected = np.float32(sum(1 << rank for rank in kept)) * np.float32(1 / len(kept))
    assert average[0][0] == expected, (average[0][0], kept)
    return members, _digest(average[0])


def _allgather(engine: Any, me: int, number: int, plan: Plan) -> tuple[list[int], str]:
    result = engine.allgather(np.full((me + 1, 5), me), name=f"number {number}")
    members = list(dict.fromkeys(result[:, 0].tolist()))
    assert result[:, 0].tolist() == [rank for rank in members for _ in range(rank + 1)]
    return members, _digest(result)


def _objects(engine: Any, me: int, number: int, plan: Plan) -> tuple[list[int], str]:
    everyone = engine.allgather_object({"me": me, "text": "x" * me * 100})
    return [entry["me"] for entry in everyone], _digest(
        np.frombuffer(repr(everyone).encode("utf8"), "u1")
    )


def _broadcast(engine: Any, me: int, number: int, plan: Plan) -> tuple[None, str]:
    return None, _digest(engine.broadcast(np.full(plan.items, 7.0 + number), replicated=True))


def _broadcast_object(engine: Any, me: int, number: int, plan: Plan) -> tuple[None, str]:
    return None, engine.broadcast_object(f"of {number}", replicated=True)


def _reduce_scatter(engine: Any, me: int, number: int, plan: Plan) -> tuple[list[int], None]:
    rows = (np.arange(ROWS)[:, None] * ROW + (1 << me)) * np.ones((ROWS, 50), np.int64)
    mine = engine.reduce_scatter(rows.astype(np.int64))
    members = _bits(int(mine[0, 0]) % ROW)
    share = ROWS // len(members)
    first = members.index(me) * share
    expected = [row * len(members) for row in range(first, first + share)]
    assert (mine[:, 0] // ROW).tolist() == expected, (mine[:, 0] // ROW, members)
    return members, None


def _alltoall(engine: Any, me: int, number: int, plan: Plan) -> tuple[list[int], None]:
    members = engine.members
    rows = [[me, member] for member in members for _ in range(2)]
    received, counts = engine.alltoall(np.array(rows), [2] * len(members))
    assert (received[:, 1] == me).all()
    assert set(counts) == {2}
    return received[::2, 0].tolist(), None


def _barrier(engine: Any, me: int, number: int, plan: Plan) -> tuple[None, None]:
    engine.barrier(name=f"number {number}")
    return None, None


_OPERATIONS: list[tuple[str, Callable[..., Any]]] = [
    ("allreduce", _allreduce),
    ("average", _average),
    ("allgather", _allgather),
    ("objects", _objects),
    ("broadcast", _broadcast),
    ("broadcast_object", _broadcast_object),
    ("reduce_scatter", _reduce_scatter),
    ("alltoall", _alltoall),
    ("barrier", _barrier),
]


if __name__ == "__main__":
    random.seed()
    main(Plan.from_json(sys.argv[1]))
