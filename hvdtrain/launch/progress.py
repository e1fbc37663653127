"""The progress of an attempt, from its ranks' reports. Times are from the launcher's clock."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from hvdtrain.agent.rank_report import RankReport, Usage
from hvdtrain.launch.observer import CheckpointSaved, Observer, Progress, RankTable

__all__ = [
    "JobProgress",
    "Pace",
    "PhaseTimes",
    "ProgressPublisher",
    "RankPaces",
    "Straggler",
    "TrainingWaits",
    "find_straggler",
    "holding_up",
]

TRAINING = "training"
# Within init(), before ranks can communicate.
STARTING_MPI = "starting MPI"
# The phase of a parameter server, which does not step.
SERVING = "serving"


class JobProgress:
    """The newest report of each rank, and statistics of all reports."""

    def __init__(self, started_at: float = 0.0) -> None:
        self.latest: dict[int, RankReport] = {}
        # When each rank last reported a new step or phase.
        self.moved: dict[int, float] = {}
        # When a checkpoint was last written.
        self.saved_at: float | None = None
        self.phases = PhaseTimes(started_at)
        self.waits = TrainingWaits()
        self.paces = RankPaces()
        # The newest usage of each rank, from its agent.
        self.usage: dict[int, Usage] = {}
        self._chief: int | None = None

    def add(self, rank: int, report: RankReport, now: float) -> None:
        """Add a report of ``rank``."""
        before = self.latest.get(rank, RankReport())
        if (report.step, report.phase) != (before.step, before.phase) or rank not in self.latest:
            self.moved[rank] = now
        self.latest[rank] = report
        self.waits.add(rank, before, report)
        self.paces.add(rank, report, now)
        if self._chief is None or rank <= self._chief:
            self._chief = rank
            self.phases.enter(report.phase, now)
        if report.saved is not None and report.saved != before.saved:
            self.saved_at = now

    def skip(self, seconds: float, now: float) -> None:
        """Ignore the last ``seconds``, during which this process could not receive reports."""
        self.moved = {rank: min(now, moved + seconds) for rank, moved in self.moved.items()}

    @property
    def moved_at(self) -> float | None:
        """Time of the last report with a new step or phase; None if there are no reports."""
        return max(self.moved.values(), default=None)

    @property
    def started(self) -> set[int]:
        """The ranks that have started MPI, or that report although they don't use MPI."""
        return {r for r, report in self.latest.items() if report.phase not in ("", STARTING_MPI)}

    @property
    def step(self) -> int | None:
        """The highest step of any rank."""
        return self._max("step")

    @property
    def resumed(self) -> int | None:
        """Step of the checkpoint that this attempt resumed from."""
        return self._max("resumed")

    @property
    def saved(self) -> int | None:
        """Step of the newest checkpoint, including the one that the attempt resumed from."""
        return self._max("saved", "resumed")

    @property
    def samples(self) -> int | None:
        """Samples that all ranks have trained on in this attempt."""
        return self._max("samples")

    @property
    def has_stepped(self) -> bool:
        """Whether a rank has completed a step beyond the resumed checkpoint."""
        return any((r.step or 0) > (r.resumed or 0) for r in self.latest.values())

    def is_writing(self, ranks: Collection[int]) -> bool:
        """Return whether one of ``ranks`` is writing a checkpoint."""
        return any(rank in ranks and report.writing for rank, report in self.latest.items())

    def event(self, held_by: Sequence[int], hosts: Mapping[int, str]) -> Progress:
        """Return the event that describes the current progress."""
        paces = self.paces.recent()
        slow = find_straggler(paces)
        losses = (report.loss for report in self.latest.values() if report.loss is not None)
        return Progress(
            step=self.step,
            epoch=self._max("epoch"),
            total_steps=self._max("total_steps"),
            own_s=[pace.own_s for pace in paces.values()],
            reduced_bytes_per_s=round(sum(pace.reduced_per_s for pace in paces.values())),
            slow=(slow.rank, round(slow.factor, 2), hosts.get(slow.rank)) if slow else None,
            samples=self.samples,
            loss=next(losses, None),
            held_by=held_by,
        )

    def _max(self, *fields: str) -> int | None:
        values = (getattr(r, field) for r in self.latest.values() for field in fields)
        return max((value for value in values if value is not None), default=None)


def holding_up(
    reports: JobProgress, running: Collection[int], now: float, after_s: float
) -> list[int]:
    """Return the ranks that other ranks wait for, or [] if a rank made progress recently.

    Recently means within the last ``after_s`` seconds.
    """
    if reports.moved_at is None or now - reports.moved_at < after_s:
        return []
    latest = {rank: reports.latest[rank] for rank in running if rank in reports.latest}
    waiting = {rank for rank, report in latest.items() if report.waiting_in}
    # A stopped process is not waiting, even if its last report says so: the collective may have
    # finished since.
    stopped = {rank for rank in latest if rank in reports.usage and reports.usage[rank].stopped}
    return sorted(latest.keys() - waiting | stopped) if waiting else []


# The names of phases in summaries. Phases that a program defines are "other" there.
_KINDS = {
    "": "start",
    "starting MPI": "start",
    "started": "start",
    "compiling": "start",
    "training": "training",
    "end of an epoch": "training",
    "validation": "validation",
    "prediction": "validation",
    "checkpoint": "checkpoints",
    "serving": "training",
    "after fit": "end",
}


class PhaseTimes:
    """Total time in each phase, from the reports of the chief."""

    def __init__(self, started_at: float) -> None:
        self._seconds: dict[str, float] = {}
        self._kind = "start"
        self._since = started_at

    def enter(self, phase: str, now: float) -> None:
        """Record that the chief is in ``phase``."""
        kind = _KINDS.get(phase, "other")
        if kind != self._kind:
            self._add(now)
            self._kind = kind

    def seconds(self, now: float) -> Mapping[str, float]:
        """Return the seconds in each phase until now: start, training, validation, ..., other."""
        self._add(now)
        return dict(self._seconds)

    def _add(self, now: float) -> None:
        self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + now - self._since
        self._since = now


class TrainingWaits:
    """Total time that ranks waited during training: for each other, and for their input."""

    def __init__(self) -> None:
        self._for_others: dict[int, float] = {}
        self._for_input: dict[int, float] = {}

    def add(self, rank: int, before: RankReport, now: RankReport) -> None:
        """Add a rank's report, given the previous one.

        Ranks report each change of phase at once, so the wait between two reports belongs to the
        phase that the first report names.
        """
        if _KINDS.get(before.phase) != "training":
            return
        for seconds, end_s, begin_s in (
            (self._for_others, now.waited_s, before.waited_s),
            (self._for_input, now.input_s, before.input_s),
        ):
            if end_s is not None:
                seconds[rank] = seconds.get(rank, 0.0) + max(0.0, end_s - (begin_s or 0.0))

    def shares(self, training_s: float) -> tuple[float | None, float | None]:
        """Return two fractions of the training time: waits for other ranks, and waits for input.

        Each fraction is the mean over the reporting ranks, or None if unknown. Their sum is at most
        1.
        """
        for_others = _share(self._for_others, training_s)
        for_input = _share(self._for_input, training_s)
        if for_input is not None:
            for_input = min(for_input, 1.0 - (for_others or 0.0))
        return for_others, for_input


def _share(seconds: Mapping[int, float], training_s: float) -> float | None:
    if training_s <= 0 or not any(seconds.values()):
        return None
    return min(1.0, statistics.fmean(seconds.values()) / training_s)


WINDOW_S = 20.0
# Smaller differences between ranks are noise.
LEAST_FACTOR = 1.3
# Waits up to a millisecond are not measured, and count as a rank's own time.
LEAST_OWN_S = 0.005


class _Mark(NamedTuple):
    at_s: float
    step: int
    waited_s: float
    input_s: float
    reduced_bytes: int


class Pace(NamedTuple):
    """How fast a rank works. 0 means unknown."""

    own_s: float  # seconds per step, without waiting for other ranks
    input_s: float = 0.0  # the part of own_s in which the rank waits for its input
    reduced_per_s: float = 0.0  # bytes that the rank passes to allreduce per second


class RankPaces:
    """Each rank's own time per step, without the first step, because that includes compilation."""

    def __init__(self) -> None:
        self._first: dict[int, _Mark] = {}
        self._recent: dict[int, deque[_Mark]] = {}

    def add(self, rank: int, report: RankReport, now: float) -> None:
        """Add a report."""
        if report.step is None or report.waited_s is None or report.phase != TRAINING:
            return
        mark = _Mark(
            now, report.step, report.waited_s, report.input_s or 0.0, report.reduced_bytes or 0
        )
        self._first.setdefault(rank, mark)
        marks = self._recent.setdefault(rank, deque())
        marks.append(mark)
        while now - marks[0].at_s > WINDOW_S and len(marks) > 2:
            marks.popleft()

    def recent(self) -> dict[int, Pace]:
        """Return the mean pace of each rank in the last ``WINDOW_S`` seconds."""
        return self._since({rank: marks[0] for rank, marks in self._recent.items()})

    def overall(self) -> dict[int, Pace]:
        """Return the mean pace of each rank in the whole attempt."""
        return self._since(self._first)

    def _since(self, first: Mapping[int, _Mark]) -> dict[int, Pace]:
        paces = {}
        for rank, begin in first.items():
            end = self._recent[rank][-1]
            steps, elapsed_s = end.step - begin.step, end.at_s - begin.at_s
            # Delayed reports may arrive at the same time.
            if steps > 0 and elapsed_s > 0:
                own_s = max(0.0, elapsed_s - (end.waited_s - begin.waited_s))
                reduced = max(0, end.reduced_bytes - begin.reduced_bytes)
                input_s = end.input_s - begin.input_s
                paces[rank] = Pace(own_s / steps, input_s / steps, reduced / elapsed_s)
        return paces


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that the other ranks wait for."""

    rank: int
    own_s: float  # its own time per step, in seconds
    median_s: float  # the median of all ranks
    is_starved: bool = False  # whether it spends most of own_s waiting for its input

    @property
    def factor(self) -> float:
        """The rank's own time per step as a multiple of the median."""
        return self.own_s / self.median_s


def find_straggler(paces: Mapping[int, Pace]) -> Straggler | None:
    """Return the slowest rank, if it is much slower than the other ranks."""
    if len(paces) < 2:
        return None
    slowest = max(paces, key=lambda rank: paces[rank].own_s)
    own_s, input_s, _ = paces[slowest]
    # Of two ranks, the faster one is the reference.
    median_s = max(statistics.median_low(pace.own_s for pace in paces.values()), 1e-6)
    if own_s < LEAST_FACTOR * median_s or own_s - median_s < LEAST_OWN_S:
        return None
    return Straggler(rank=slowest, own_s=own_s, median_s=median_s, is_starved=input_s > own_s / 2)


INTERVAL_S = 1.0
# After this long without a step, the ranks that hold up the job are published.
HELD_UP_S = 5.0
# Rank tables grow with the number of ranks, so they are published less often for more ranks.
TABLE_INTERVAL_S = 10.0
_RANKS_PER_S = 10

_Value = TypeVar("_Value")


class ProgressPublisher:
    """Sends events to an observer when the reports of an attempt contain something new."""

    def __init__(self, observer: Observer, reports: JobProgress, ranks: int) -> None:
        self._observer = observer
        self._reports = reports
        self._ranks = ranks
        self._due_at = 0.0
        self._table_due_at = 0.0
        self._published: tuple[int | None, int | None, list[int]] = (None, None, [])
        self._saved = reports.saved

    def review(
        self, now: float, hosts: Mapping[int, str], running: Collection[int], *, last: bool = False
    ) -> None:
        """Send events about what is new, if the last call was long ago or this is the ``last``."""
        if now < self._due_at and not last:
            return
        self._due_at = now + INTERVAL_S
        reports = self._reports
        if reports.saved != self._saved:
            self._saved = reports.saved
            self._observer.on_event(CheckpointSaved(step=reports.saved))
        held_by = holding_up(reports, running, now, HELD_UP_S)
        progress = reports.event(held_by, hosts)
        if (state := (progress.step, progress.epoch, held_by)) != self._published:
            self._published = state
            self._observer.on_event(progress)
        if reports.latest and (now >= self._table_due_at or last):
            self._table_due_at = now + max(TABLE_INTERVAL_S, self._ranks / _RANKS_PER_S)
            self._observer.on_event(RankTable(columns=self._columns()))

    def _columns(self) -> Mapping[str, Any]:
        """Return columns with a value per rank, without optional columns that no rank reports."""
        latest, usage = self._reports.latest, self._reports.usage
        paces = self._reports.paces.recent()
        columns = {
            "step": self._column(latest, lambda report: report.step),
            "phase": self._column(latest, lambda report: report.phase),
            "own_s": self._column(paces, lambda pace: float(f"{pace.own_s:.4g}")),
            "waited_s": self._column(latest, lambda report: report.waited_s),
            "rss_mb": self._column(usage, lambda usage: _mebibytes(usage.rss_bytes)),
            "cpu": self._column(usage, lambda usage: usage.cpu),
        }
        optional = {
            "input_s": self._column(latest, lambda report: report.input_s),
            "reduced_bytes": self._column(latest, lambda report: report.reduced_bytes),
            "gpu": self._column(usage, lambda usage: usage.gpu),
            "gpu_mb": self._column(usage, lambda usage: _mebibytes(usage.gpu_bytes)),
        }
        unknown = [None] * self._ranks
        return columns | {name: values for name, values in optional.items() if values != unknown}

    def _column(self, by_rank: Mapping[int, _Value], value: Callable[[_Value], Any]) -> list[Any]:
        return [value(by_rank[rank]) if rank in by_rank else None for rank in range(self._ranks)]


def _mebibytes(size: int | None) -> int | None:
    return None if size is None else size >> 20
