"""Timing the same work on all ranks; bandwidths as nccl-tests defines them.

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
    """Seconds of one call over several measurements, on the slowest rank.

    Attributes:
        best_s: The quickest call.
        median_s: The usual call.
        cpu_best_s: Processor time of a call in the best measurement, all threads of the rank that
            used most; unlike the others it grows little when other programs use the cores.
    """

    best_s: float
    median_s: float
    cpu_best_s: float

    def divided(self, parts: int) -> Timing:
        """The time of one of ``parts`` equal pieces of work."""
        shares = {name: seconds / parts for name, seconds in dataclasses.asdict(self).items()}
        return Timing(**shares)


def time_in_turn(
    collectives: Engine,
    operations: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    calls: int = 1,
) -> dict[str, Timing]:
    """Time operations in turn, so that whatever else the machine does meets all of them alike.

    All ranks begin a measurement together; each call counts as long as the slowest rank's.

    Args:
        collectives: The engine.
        operations: By name; the same on every rank.
        repetitions: Measurements of each, after one that doesn't count.
        calls: Calls in one measurement; several for quick operations, whose processor time could
            not be read otherwise.
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
    """The largest of all ranks' values, for each of several; collective."""
    mine = np.array(values, np.float64)
    return [float(most) for most in collectives.allreduce(mine, "max", name="hvdtrain bench")]


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an allreduce: what the hardware had to carry, in bytes a second.

    Each of the n ranks must send and receive at least 2 (n - 1) / n times its array, whatever the
    algorithm; so this can be held against the speed of the memory or of the network, and
    compared between different numbers of ranks.
    """
    return nbytes / seconds * 2 * (ranks - 1) / ranks
