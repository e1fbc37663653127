"""Timing of the same work on all ranks, and bandwidths as defined by nccl-tests.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hvdtrain.collectives.engine import Engine

__all__ = ["Timing", "bus_bandwidth", "largest", "time_in_turn"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call on the slowest rank, over several measurements."""

    best_s: float  # the fastest call
    median_s: float  # the median call
    # Smallest processor time of any call. The processor time of a call is the total of all threads,
    # on the rank where this total is largest. Other programs hardly affect this value.
    cpu_best_s: float

    def divided(self, parts: int) -> Timing:
        """Return the times of one part, if the measured work consists of ``parts`` equal parts."""
        shares = {name: seconds / parts for name, seconds in dataclasses.asdict(self).items()}
        return Timing(**shares)


def time_in_turn(
    collectives: Engine,
    operations: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    calls: int = 1,
) -> dict[str, Timing]:
    """Time operations alternately, so that other load affects all of them equally.

    All ranks start a measurement together, and the result is the time of the slowest rank.

    The warm-up is not counted. Use several ``calls`` per measurement for fast operations, because
    the processor time of one call is too short to measure.
    """
    wall_s = np.empty((len(operations), repetitions + 1, calls))
    cpu_s = np.empty((len(operations), repetitions + 1))
    for repetition in range(repetitions + 1):
        for row, operation in enumerate(operations.values()):
            collectives.barrier(name="hvdtrain bench")
            cpu_start = time.process_time()
            for call in range(calls):
                start = time.perf_counter()
                operation()
                wall_s[row, repetition, call] = time.perf_counter() - start
            cpu_s[row, repetition] = (time.process_time() - cpu_start) / calls
    slowest_s = collectives.allreduce(wall_s[:, 1:], "max", name="hvdtrain bench")
    most_cpu_s = collectives.allreduce(cpu_s[:, 1:], "max", name="hvdtrain bench")
    return {
        name: Timing(
            best_s=float(slowest_s[row].min()),
            median_s=float(np.median(slowest_s[row])),
            cpu_best_s=float(most_cpu_s[row].min()),
        )
        for row, name in enumerate(operations)
    }


def largest(collectives: Engine, *values: float) -> list[float]:
    """Return the maximum of each argument over all ranks. All ranks must call this."""
    local_values = np.array(values, np.float64)
    return [
        float(value) for value in collectives.allreduce(local_values, "max", name="hvdtrain bench")
    ]


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an allreduce in bytes per second.

    With any algorithm, each of the n ranks must send and receive at least 2 (n - 1) / n times the
    size of its array. The bus bandwidth can therefore be compared with the speed of memory or
    network, and between different numbers of ranks.
    """
    return nbytes / seconds * 2 * (ranks - 1) / ranks
