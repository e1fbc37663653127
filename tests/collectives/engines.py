"""The engines for the contract tests, and helpers to compare ranks.

Engines are created without ``hvdtrain.init()``, which would import TensorFlow. Hosts are simulated
by passing each engine the communicator of the ranks that share memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import exit_hooks, host_memory, tuning
from hvdtrain.collectives.engine import Engine, single_engine
from hvdtrain.collectives.kernels import accumulator_dtype
from hvdtrain.collectives.mpi import MpiTransport
from hvdtrain.collectives.mpi_start import start_mpi
from hvdtrain.collectives.shared_memory import SharedMemoryTransport
from hvdtrain.collectives.tuning import Link

__all__ = [
    "BFLOAT16",
    "CASES",
    "DTYPES",
    "EVERY_ENGINE",
    "FAR",
    "EngineCase",
    "Subject",
    "everyone",
    "expected",
    "mpi_of_job",
    "new_engine",
    "on_engines",
    "shared_engine",
    "values",
]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    np.dtype(kind)
    for kind in (
        *("float16", BFLOAT16, "float32", "float64"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
    )
]

# Small enough for several chunks per test array, and large enough for large messages.
MANY_CHUNKS = 4096
LARGE_CHUNKS = 1 << 16


# Links for three rounds in small segments, and for one round if possible.
SLOW = Link(latency_s=0.0, bytes_per_s=1e6)
FAR = Link(latency_s=1.0, bytes_per_s=1e9)


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """An engine to test."""

    kind: str
    hosts: tuple[int, ...]  # the simulated host of each rank
    chunk_bytes: int = MANY_CHUNKS
    arena: bool = False  # whether to use the arena for results of any size
    slots: int | None = None  # the number of slots in shared memory
    link: Link | None = None  # the assumed link between hosts
    many: bool = False  # whether to agree as if there were too many ranks for direct messages

    def __str__(self) -> str:
        size = "many-chunks" if self.chunk_bytes == MANY_CHUNKS else "large-chunks"
        if self.kind == "single":
            return "single"
        size += "-arena" if self.arena else ""
        if len(set(self.hosts)) == 1:
            return f"{self.kind}-{size}"
        return f"{self.kind}-hosts-{''.join(map(str, self.hosts))}-{size}"


CASES = [
    EngineCase(kind="single", hosts=(0,)),
    EngineCase(kind="mpi", hosts=(0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0), chunk_bytes=LARGE_CHUNKS),
    EngineCase(kind="shared_memory", hosts=(0, 0), arena=True),
    EngineCase(kind="mpi", hosts=(0, 0, 0), chunk_bytes=LARGE_CHUNKS, link=SLOW, many=True),
    EngineCase(kind="shared_memory", hosts=(0, 0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0, 0), chunk_bytes=LARGE_CHUNKS, arena=True),
    EngineCase(kind="shared_memory", hosts=(0, 0, 1), slots=6, link=FAR),
    EngineCase(kind="shared_memory", hosts=(0, 0, 0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0, 1, 1), many=True),
    EngineCase(
        kind="shared_memory",
        hosts=(0, 1, 0, 1),
        chunk_bytes=LARGE_CHUNKS,
        slots=5,
        link=SLOW,
    ),
]


def on_engines(cases: Sequence[EngineCase], fixture: str = "case") -> pytest.MarkDecorator:
    """Run a test for each case on its number of ranks. ``fixture`` gets the case."""
    return pytest.mark.parametrize(
        ("rank_count", fixture),
        [(len(case.hosts), case) for case in cases],
        indirect=True,
        ids=[f"np{len(case.hosts)}-{case}" for case in cases],
    )


EVERY_ENGINE = on_engines(CASES, "subject")


@functools.cache
def mpi_of_job() -> ModuleType:
    """Return MPI for use in tests."""
    mpi = start_mpi(read_topology(os.environ))
    # Finalizes MPI on all processes together at their end.
    transport = MpiTransport(mpi, mpi.COMM_WORLD, mpi.COMM_SELF, MANY_CHUNKS, 30.0)
    exit_hooks.install(Engine(transport))
    return mpi


@functools.cache
def _peers() -> Any:
    return mpi_of_job().COMM_WORLD.Dup()


def new_engine(case: EngineCase, timeout_s: float = 30.0) -> Any:
    """Create the engine of a case. All ranks of the job must call this."""
    if case.kind == "single":
        return single_engine()
    comm = mpi_of_job().COMM_WORLD
    host = comm.Split(case.hosts[comm.Get_rank()], comm.Get_rank())
    kind = MpiTransport if case.kind == "mpi" else SharedMemoryTransport
    transport: Any = kind(mpi_of_job(), comm, host, case.chunk_bytes, timeout_s)
    if case.arena:
        transport.least_in_arena = 0
    with pytest.MonkeyPatch.context() as patch:
        if case.link is not None:
            patch.setattr(transport, "_measure_link", lambda comm: case.link)
            # Test arrays are small.
            patch.setattr(tuning, "LEAST_SEGMENT_BYTES", 4096)
            patch.setattr(tuning, "LEAST_MESSAGE_BYTES", 4096)
        if case.many:
            patch.setattr(tuning, "MOST_RANKS", 1)
        if case.slots is not None:
            patch.setattr(host_memory, "ring_slots", lambda *_: case.slots)
        return Engine(transport)


@functools.cache
def shared_engine(case: EngineCase) -> Any:
    """Return the engine shared by all tests that leave it usable."""
    return new_engine(case)


def everyone(size: int, obj: Any) -> list[Any]:
    """Gather objects from all ranks with MPI instead of the code under test."""
    return [obj] if size == 1 else _peers().allgather(obj)


@dataclass(frozen=True)
class Subject:
    """An engine under test and its case."""

    engine: Any
    case: EngineCase

    def assert_alike(self, arrays: Sequence[np.ndarray]) -> None:
        """Check that all ranks have the same dtypes, shapes and bytes."""
        own = [(array.dtype.name, array.shape, array.tobytes()) for array in arrays]
        for other in everyone(self.engine.size, own):
            assert other == own

    def shapes(self, dtype: np.dtype) -> list[tuple[int, ...]]:
        """Return shapes around the size of a chunk, and small and empty ones."""
        chunk = self.case.chunk_bytes // accumulator_dtype(dtype).itemsize
        if self.case.chunk_bytes > MANY_CHUNKS and dtype != np.float32:
            chunk = 5000
        edges = [(chunk - 1,), (chunk,), (chunk + 1,), (2 * chunk + 3,)]
        return [(), (0,), (1,), (7,), (3, 5), (0, 4), (2, 3, 7), *edges, (2, 1, 1)]


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a rank's contribution, which consists of small integers, so results are exact."""
    numbers = np.random.default_rng([rank, *shape]).integers(1, 4, shape)
    return (numbers > 2).astype(dtype) if dtype.kind == "b" else numbers.astype(dtype)


def expected(
    op: str, size: int, shape: tuple[int, ...], make: Callable[..., np.ndarray], dtype: np.dtype
) -> np.ndarray:
    """Return the expected result for the contributions ``make(rank, shape, dtype)``."""
    every = np.stack([make(rank, shape, dtype) for rank in range(size)])
    wide = every.astype(accumulator_dtype(dtype))
    if op in ("sum", "average"):
        total = np.add.reduce(wide, axis=0, dtype=wide.dtype)
        if op == "average":
            total = total * wide.dtype.type(1.0 / size)
        return np.asarray(total).astype(dtype)
    ufunc = {"min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    if op == "product" and dtype.kind == "b":
        ufunc = np.logical_and
    return np.asarray(ufunc.reduce(wide, axis=0)).astype(dtype)
