"""The straggler that holds a job up: the rank that takes long for a step and waits least.

In synchronous training all ranks take the same time for a step, waiting included. What a rank
takes itself is the rest: ``(time - waited) / steps``. What it waits for its input is part of that:
others wait meanwhile.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.agent.rank_report import RankReport

__all__ = ["Pace", "RankPaces", "Straggler", "find_straggler"]

WINDOW_S = 20.0
# Below this a difference is what ranks have by chance.
LEAST_FACTOR = 1.3
# Waits of a millisecond and less don't count, and so hide in a rank's own time.
LEAST_OWN_S = 0.005


class _Mark(NamedTuple):
    at_s: float
    step: int
    waited_s: float
    input_s: float
    reduced_bytes: int


class Pace(NamedTuple):
    """The time that a rank takes for a step itself, without what it waits for others.

    Attributes:
        own_s: How long, in seconds.
        input_s: For how long of that it waits for its input; 0 also where it does not tell.
        reduced_per_s: How many bytes it puts into allreduce in a second; 0 also where it does not
            tell.
    """

    own_s: float
    input_s: float = 0.0
    reduced_per_s: float = 0.0


class RankPaces:
    """Each rank's own time for a step, from its reports; times are the caller's clock."""

    def __init__(self) -> None:
        self._first: dict[int, _Mark] = {}
        self._recent: dict[int, deque[_Mark]] = {}

    def note(self, rank: int, report: RankReport, now: float) -> None:
        """Take in a report; those before the first step, which compiles, don't count."""
        if report.step is None or report.waited_s is None or report.phase != "training":
            return
        mark = _Mark(
            now,
            report.step,
            report.waited_s,
            report.input_s or 0.0,
            report.reduced_bytes or 0,
        )
        self._first.setdefault(rank, mark)
        marks = self._recent.setdefault(rank, deque())
        marks.append(mark)
        while now - marks[0].at_s > WINDOW_S and len(marks) > 2:
            marks.popleft()

    def of_late(self) -> dict[int, Pace]:
        """Return what each rank has taken itself for a step, of late."""
        return _paces({rank: marks[0] for rank, marks in self._recent.items()}, self._recent)

    def in_all(self) -> dict[int, Pace]:
        """Return what each rank has taken itself for a step, on the average."""
        return _paces(self._first, self._recent)


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: Its number.
        own_s: What it takes for a step itself, in seconds.
        median_s: What the ranks take in the middle.
        is_starved: Whether it waits for its input most of that time.
    """

    rank: int
    own_s: float
    median_s: float
    is_starved: bool = False

    @property
    def factor(self) -> float:
        """Its time for a step, as a multiple of the median."""
        return self.own_s / self.median_s


def find_straggler(paces: Mapping[int, Pace]) -> Straggler | None:
    """The rank that takes longest for a step, if that is much longer than the others."""
    if len(paces) < 2:
        return None
    slowest = max(paces, key=lambda rank: paces[rank].own_s)
    own_s, input_s, _ = paces[slowest]
    # Of two ranks the other one is what is usual.
    median_s = max(statistics.median_low(pace.own_s for pace in paces.values()), 1e-6)
    found = Straggler(rank=slowest, own_s=own_s, median_s=median_s, is_starved=input_s > own_s / 2)
    is_one = found.factor >= LEAST_FACTOR and found.own_s - found.median_s >= LEAST_OWN_S
    return found if is_one else None


def _paces(first: Mapping[int, _Mark], recent: Mapping[int, deque[_Mark]]) -> dict[int, Pace]:
    found = {}
    for rank, begin in first.items():
        end = recent[rank][-1]
        steps, taken_s = end.step - begin.step, end.at_s - begin.at_s
        # Reports that were held up may come at once.
        if steps > 0 and taken_s > 0:
            own_s = max(0.0, taken_s - (end.waited_s - begin.waited_s))
            input_s = end.input_s - begin.input_s
            reduced = end.reduced_bytes - begin.reduced_bytes
            found[rank] = Pace(own_s / steps, input_s / steps, max(0.0, reduced / taken_s))
    return found
