"""The progress of a job, from the reports of its ranks, and the events about it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from hvdtrain.agent.rank_report import RankReport, Usage
from hvdtrain.launch.observer import CheckpointSaved, Observer, Progress, RankTable

__all__ = [
    "JobProgress",
    "Pace",
    "PhaseTimes",
    "ProgressRecord",
    "RankPaces",
    "Straggler",
    "TrainingWaits",
    "find_straggler",
    "held_by",
]

TRAINING = "training"
# Within init(), before ranks can exchange anything.
STARTING_MPI = "starting MPI"
# A parameter server makes no steps of its own.
SERVING = "serving"


class JobProgress:
    """The newest report of each rank; times are the caller's clock.

    Attributes:
        latest: The newest report of each rank.
        moved: When the step or the phase of each rank was last new.
        saved_at: When a checkpoint was last written; None for never.
        phases: Where the chief's time goes; the chief is the first rank that reports.
        waits: What ranks have waited while they trained.
        paces: What each rank takes for a step itself.
        usage: What each rank takes of its host, as its agent told last.
    """

    def __init__(self, began: float = 0.0) -> None:
        self.latest: dict[int, RankReport] = {}
        self.moved: dict[int, float] = {}
        self.saved_at: float | None = None
        self.phases = PhaseTimes(began)
        self.waits = TrainingWaits()
        self.paces = RankPaces()
        self.usage: dict[int, Usage] = {}
        self._first: int | None = None

    def note(self, rank: int, report: RankReport, now: float) -> None:
        """Take in a report of ``rank``."""
        before = self.latest.get(rank, RankReport())
        if (report.step, report.phase) != (before.step, before.phase) or rank not in self.latest:
            self.moved[rank] = now
        self.latest[rank] = report
        self.waits.note(rank, before, report)
        self.paces.note(rank, report, now)
        if self._first is None or rank <= self._first:
            self._first = rank
            self.phases.note(report.phase, now)
        if report.saved is not None and report.saved != before.saved:
            self.saved_at = now

    def make_up_for(self, seconds: float, now: float) -> None:
        """Ignore the last ``seconds``, in which no report could be taken in."""
        self.moved = {rank: min(now, moved + seconds) for rank, moved in self.moved.items()}

    @property
    def moved_at(self) -> float | None:
        """The time when a step, a phase or a rank was last new; None where nothing was reported."""
        return max(self.moved.values(), default=None)

    @property
    def started(self) -> set[int]:
        """Ranks that have started MPI, or report without."""
        return {r for r, report in self.latest.items() if report.phase not in ("", STARTING_MPI)}

    @property
    def step(self) -> int | None:
        """The most that a rank has done."""
        return self._most(report.step for report in self.latest.values())

    @property
    def epoch(self) -> int | None:
        """The latest epoch that a rank has come to."""
        return self._most(report.epoch for report in self.latest.values())

    @property
    def total_steps(self) -> int | None:
        """The step with which the training of all ranks is to end."""
        return self._most(report.total_steps for report in self.latest.values())

    @property
    def resumed(self) -> int | None:
        """Step of the checkpoint that this run of the program began from."""
        return self._most(report.resumed for report in self.latest.values())

    @property
    def samples(self) -> int | None:
        """Samples that all ranks have trained on in this run of the program; None for unknown."""
        return self._most(report.samples for report in self.latest.values())

    @property
    def loss(self) -> float | None:
        """The loss of late, which the chief tells."""
        found = [report.loss for report in self.latest.values() if report.loss is not None]
        return found[0] if found else None

    @property
    def stepped(self) -> bool:
        """Whether a rank has done a step that an earlier run of the program had not saved."""
        return any(
            report.step is not None and report.step > (report.resumed or 0)
            for report in self.latest.values()
        )

    @property
    def saved(self) -> int | None:
        """Step of the newest checkpoint that there is."""
        found = [step for report in self.latest.values() for step in (report.saved, report.resumed)]
        return self._most(found)

    @staticmethod
    def _most(steps: Iterable[int | None]) -> int | None:
        return max((step for step in steps if step is not None), default=None)


def held_by(
    reports: JobProgress, running: Collection[int], now: float, after_s: float
) -> list[int]:
    """Ranks that others wait for, where none has done a step for ``after_s``; none for none."""
    if reports.moved_at is None or now - reports.moved_at < after_s:
        return []
    latest = {rank: reports.latest[rank] for rank in running if rank in reports.latest}
    waiting = {rank for rank, report in latest.items() if report.waiting_in}
    # Its last word may be that it waits, as for an operation that has long been done.
    stopped = {rank for rank in latest if rank in reports.usage and reports.usage[rank].stopped}
    return sorted(latest.keys() - waiting | stopped) if waiting else []


# What phases are called in a summary; those that a program of the user's makes up are "other".
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
    """Adds up the phases that a chief reports; times are the caller's clock.

    Args:
        began: When the attempt did.
    """

    def __init__(self, began: float) -> None:
        self._seconds: dict[str, float] = {}
        self._kind = "start"
        self._since = began

    def note(self, phase: str, now: float) -> None:
        """Note that the chief is in a phase now."""
        kind = _KINDS.get(phase, "other")
        if kind != self._kind:
            self._add(now)
            self._kind = kind

    def seconds(self, now: float) -> Mapping[str, float]:
        """Return how long each has taken up to now: start, training, validation, ..., other."""
        self._add(now)
        return dict(self._seconds)

    def _add(self, now: float) -> None:
        self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + now - self._since
        self._since = now


class TrainingWaits:
    """Adds up what ranks have waited while they trained: for each other, and for their input."""

    def __init__(self) -> None:
        self._for_others: dict[int, float] = {}
        self._for_input: dict[int, float] = {}

    def note(self, rank: int, before: RankReport, now: RankReport) -> None:
        """Take in a rank's report, given the one before it.

        Ranks report each change of phase at once, so what they waited in between belongs to the
        phase in which they were ``before``.
        """
        if _KINDS.get(before.phase) != "training":
            return
        for seconds, ended_s, began_s in (
            (self._for_others, now.waited_s, before.waited_s),
            (self._for_input, now.input_s, before.input_s),
        ):
            if ended_s is not None:
                more_s = max(0.0, ended_s - (began_s or 0.0))
                seconds[rank] = seconds.get(rank, 0.0) + more_s

    def shares(self, training_s: float) -> tuple[float | None, float | None]:
        """The parts of so much training that ranks waited for others, and for their input.

        On the average of those that tell it; None for unknown. The two are 1 together at most.
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


INTERVAL_S = 1.0
# Without a step for so long the job stands still, which need not be for good.
HELD_S = 5.0
# Rows that tell of each rank are long, and the longer the more ranks there are.
RANKS_INTERVAL_S = 10.0
_RANKS_PER_S = 10
_SELDOM_KNOWN = ("input_s", "reduced_bytes", "gpu", "gpu_mb")

_Value = TypeVar("_Value")


class ProgressRecord:
    """Looks at the reports of one attempt, and says what is new in them.

    Args:
        observer: Receives the events.
        reports: The newest of each rank.
        ranks: How many ranks there are.
        hosts: Tells the host of each that has begun.
        running: Tells which have begun and not ended.
    """

    def __init__(
        self,
        observer: Observer,
        reports: JobProgress,
        ranks: int,
        *,
        hosts: Callable[[], Mapping[int, str]],
        running: Callable[[], Collection[int]],
    ) -> None:
        self._observer = observer
        self._reports = reports
        self._ranks = ranks
        self._hosts = hosts
        self._running = running
        self._due_at = 0.0
        self._ranks_due_at = 0.0
        self._told: tuple[int | None, int | None, list[int]] = (None, None, [])
        self._saved = reports.saved

    def review(self, now: float, *, last: bool = False) -> None:
        """Write what is new, if it is time for that, or if this is the ``last`` chance."""
        if now < self._due_at and not last:
            return
        self._due_at = now + INTERVAL_S
        reports = self._reports
        if reports.saved != self._saved:
            self._saved = reports.saved
            self._observer.on_event(CheckpointSaved(step=reports.saved))
        held = held_by(reports, self._running(), now, HELD_S)
        if (told := (reports.step, reports.epoch, held)) != self._told:
            self._told = told
            self._observer.on_event(self._progress(held))
        if reports.latest and (now >= self._ranks_due_at or last):
            self._ranks_due_at = now + max(RANKS_INTERVAL_S, self._ranks / _RANKS_PER_S)
            self._observer.on_event(RankTable(columns=self._of_ranks()))

    def _progress(self, held: list[int]) -> Progress:
        reports = self._reports
        paces = reports.paces.of_late()
        slow = find_straggler(paces)
        host = self._hosts().get(slow.rank) if slow is not None else None
        return Progress(
            step=reports.step,
            epoch=reports.epoch,
            total_steps=reports.total_steps,
            own_s=[pace.own_s for pace in paces.values()],
            reduced_bytes_per_s=round(sum(pace.reduced_per_s for pace in paces.values())),
            slow=(slow.rank, round(slow.factor, 2), host) if slow is not None else None,
            samples=reports.samples,
            loss=reports.loss,
            held_by=held,
        )

    def _of_ranks(self) -> Mapping[str, Any]:
        """A list for each thing, with a value for each rank; None where it is not known.

        What is known of no rank, as GPUs often are, has no list.
        """
        latest, usage = self._reports.latest, self._reports.usage
        paces = self._reports.paces.of_late()
        lists = {
            "step": self._list(latest, lambda report: report.step),
            "phase": self._list(latest, lambda report: report.phase),
            "own_s": self._list(paces, lambda pace: float(f"{pace.own_s:.4g}")),
            "waited_s": self._list(latest, lambda report: report.waited_s),
            "input_s": self._list(latest, lambda report: report.input_s),
            "reduced_bytes": self._list(latest, lambda report: report.reduced_bytes),
            "rss_mb": self._list(usage, lambda taken: _mebibytes(taken.rss_bytes)),
            "cpu": self._list(usage, lambda taken: taken.cpu),
            "gpu": self._list(usage, lambda taken: taken.gpu),
            "gpu_mb": self._list(usage, lambda taken: _mebibytes(taken.gpu_bytes)),
        }
        unknown = [None] * self._ranks
        return {
            name: values
            for name, values in lists.items()
            if name not in _SELDOM_KNOWN or values != unknown
        }

    def _list(self, of: Mapping[int, _Value], value: Callable[[_Value], Any]) -> list[Any]:
        return [value(of[rank]) if rank in of else None for rank in range(self._ranks)]


def _mebibytes(size: int | None) -> int | None:
    return None if size is None else size >> 20
