"""A program in which ranks die during operations of all kinds.

    mpirun -np 4 python -m tests.collectives.survivors '{"kind": "mpi", "deaths": ...}'

Rank r contributes the bit 1 << r, so that a result shows which ranks contributed. Each surviving
rank writes a JSON file to the plan's folder. The file lists the members of every operation, and the
digest of each result that must be the same on all ranks.
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
# The row number is above the bits of the ranks.
ROW = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Death:
    """The death of a rank, after a time or in a call of a method.

    The method ``where`` belongs to the engine, its transport, or a part of the transport. The rank
    dies when the method is called for the ``call``-th time.
    """

    rank: int
    after_s: float | None = None
    where: str = ""
    call: int = 1
    by: int = int(signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The operations and deaths of a run.

    ``kind`` is the transport, or "arena" for shared memory with all results in the arena. ``hosts``
    contains the simulated host of each rank.
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
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = json.loads(text)
        deaths = tuple(Death(**death) for death in values.pop("deaths"))
        return cls(deaths=deaths, **{**values, "hosts": tuple(values["hosts"])})


def main(plan: Plan) -> None:
    """Run the plan on this rank."""
    mpi = start_mpi(read_topology(os.environ))
    comm = mpi.COMM_WORLD
    host = comm.Split(plan.hosts[comm.Get_rank()], comm.Get_rank())
    kind = MpiTransport if plan.kind == "mpi" else SharedMemoryTransport
    transport: Any = kind(mpi, comm, host, plan.chunk_bytes, plan.timeout_s, plan.min_np)
    if plan.kind == "arena":
        transport.least_in_arena = 0
    # Small arrays take one round.
    transport._measure_link = lambda comm: FAR
    engine = Engine(transport)
    exit_hooks.install(engine)
    member = engine.rank
    # Open MPI crashes if a rank dies while others still set up a communicator. If a rank dies
    # before this rank has left the barrier, this rank's number changes.
    engine.barrier()
    for death in plan.deaths:
        if death.rank == member:
            _prepare(death, engine)
    results: list[Any] = []
    longest_s = 0.0
    for number in range(plan.operations):
        start_s = time.monotonic()
        name, operation = _OPERATIONS[number % len(_OPERATIONS)]
        members, digest = operation(engine, member, number, plan)
        if members is not None and name != "average":  # two operations
            assert members == list(engine.contributed), (name, members, engine.contributed)
        results.append([name, members, digest])
        longest_s = max(longest_s, time.monotonic() - start_s)
        time.sleep(plan.pause_s)
    report = {
        "member": member,
        "results": results,
        "members": engine.members,
        "rank": engine.rank,
        "generation": engine.generation,
        "longest_s": longest_s,
    }
    Path(plan.folder, f"{member}.json").write_text(json.dumps(report))


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
    # Patch the class, because recovery creates some of the objects again.
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


def _allreduce(engine: Any, member: int, number: int, plan: Plan) -> tuple[list[int], str]:
    result = engine.allreduce(np.full(plan.items, 1 << member, np.int64), name=f"number {number}")
    assert (result == result[0]).all()
    return _bits(int(result[0])), _digest(result)


def _average(engine: Any, member: int, number: int, plan: Plan) -> tuple[list[int], str]:
    array = np.full(plan.items, 1 << member, np.float32)
    total = engine.grouped_allreduce([array], name="sum")
    average = engine.grouped_allreduce([array, array[:7]], "average", require_finite=True)
    members = _bits(int(total[0][0]))
    assert len({float(value) for part in average for value in part}) == 1
    # A rank may have died after the first operation.
    kept = engine.contributed
    expected = np.float32(sum(1 << rank for rank in kept)) * np.float32(1 / len(kept))
    assert average[0][0] == expected, (average[0][0], kept)
    return members, _digest(average[0])


def _allgather(engine: Any, member: int, number: int, plan: Plan) -> tuple[list[int], str]:
    result = engine.allgather(np.full((member + 1, 5), member), name=f"number {number}")
    members = list(dict.fromkeys(result[:, 0].tolist()))
    assert result[:, 0].tolist() == [rank for rank in members for _ in range(rank + 1)]
    return members, _digest(result)


def _objects(engine: Any, member: int, number: int, plan: Plan) -> tuple[list[int], str]:
    everyone = engine.allgather_object({"member": member, "text": "x" * member * 100})
    return [entry["member"] for entry in everyone], _digest(
        np.frombuffer(repr(everyone).encode("utf8"), "u1")
    )


def _broadcast(engine: Any, member: int, number: int, plan: Plan) -> tuple[None, str]:
    return None, _digest(engine.broadcast(np.full(plan.items, 7.0 + number), replicated=True))


def _broadcast_object(engine: Any, member: int, number: int, plan: Plan) -> tuple[None, str]:
    return None, engine.broadcast_object(f"of {number}", replicated=True)


def _reduce_scatter(engine: Any, member: int, number: int, plan: Plan) -> tuple[list[int], None]:
    rows = (np.arange(ROWS)[:, None] * ROW + (1 << member)) * np.ones((ROWS, 50), np.int64)
    result = engine.reduce_scatter(rows.astype(np.int64))
    members = _bits(int(result[0, 0]) % ROW)
    share = ROWS // len(members)
    first = members.index(member) * share
    expected = [row * len(members) for row in range(first, first + share)]
    assert (result[:, 0] // ROW).tolist() == expected, (result[:, 0] // ROW, members)
    return members, None


def _alltoall(engine: Any, member: int, number: int, plan: Plan) -> tuple[list[int], None]:
    members = engine.members
    rows = [[member, other] for other in members for _ in range(2)]
    received, counts = engine.alltoall(np.array(rows), [2] * len(members))
    assert (received[:, 1] == member).all()
    assert set(counts) == {2}
    return received[::2, 0].tolist(), None


def _barrier(engine: Any, member: int, number: int, plan: Plan) -> tuple[None, None]:
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
