"""The progress and hangs of a job, as its ranks report; no input and no output here.

``running`` are always the ranks that have not ended, and ``stopped`` says of each whose agent has
answered whether its program is stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from hvdtrain.agent.rank_report import RankReport, Usage
from hvdtrain.cluster.ranges import listing
from hvdtrain.launch.phase_times import PhaseTimes, TrainingWaits
from hvdtrain.launch.rank_pace import RankPaces

__all__ = ["JobProgress", "describe_hang", "hangs", "held_by", "missing", "stuck"]

TRAINING = "training"
# Within init(), before ranks can exchange anything.
STARTING_MPI = "starting MPI"
# A parameter server makes no steps of its own.
SERVING = "serving"
# Tracing, XLA and the first reading of the data belong to the first step.
FIRST_STEP_FACTOR = 4
_MOST_OPERATIONS = 3


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


def hangs(reports: JobProgress, running: Sequence[int], now: float, timeout_s: float) -> bool:
    """Whether the ranks should have done a step by now; who reports nothing is not judged.

    A step may take ``timeout_s``, and the first four times as long; 0 is no limit.
    """
    latest = [reports.latest[rank] for rank in running if rank in reports.latest]
    states = [state for state in latest if state.phase != SERVING]
    if timeout_s <= 0 or reports.moved_at is None or not states:
        return False
    # While one writes a checkpoint the others wait for it in the next step; who waits itself is
    # not what they wait for, as after the end of its own training.
    if any(state.phase != TRAINING and not state.waiting_in for state in states):
        return False
    if all(state.phase != TRAINING for state in states):
        return False
    factor = 1 if reports.stepped else FIRST_STEP_FACTOR
    return now - reports.moved_at > timeout_s * factor


def stuck(
    reports: JobProgress, running: Sequence[int], now: float, timeout_s: float
) -> dict[int, float]:
    """Find ranks that are late with a step while others go on or wait, and for how many seconds."""
    latest = {rank: reports.latest[rank] for rank in running if rank in reports.latest}
    states = {rank: state for rank, state in latest.items() if state.phase != SERVING}
    late = {}
    for rank, state in states.items():
        quiet_s = now - reports.moved[rank]
        stepped = (state.step or 0) > (state.resumed or 0)
        limit_s = timeout_s * (1 if stepped else FIRST_STEP_FACTOR)
        if state.phase == TRAINING and not state.waiting_in and quiet_s > limit_s > 0:
            late[rank] = quiet_s
    return late if len(late) < len(states) else {}


def missing(
    reports: JobProgress, running: Sequence[int], stopped: Mapping[int, bool]
) -> dict[int, str]:
    """Find the ranks that the others wait for in a job that hangs, and tell why."""
    latest = {rank: reports.latest.get(rank, RankReport()) for rank in running}
    absent = {r: "it waits for no other rank" for r, s in latest.items() if not s.waiting_in}
    silent = {rank: "its agent does not answer" for rank in running if rank not in stopped}
    halted = {rank: "it is stopped (state T)" for rank in running if stopped.get(rank)}
    return {**(absent if len(absent) < len(latest) else {}), **silent, **halted}


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


def describe_hang(
    reports: JobProgress, hosts: Mapping[int, str], stopped: Mapping[int, bool], quiet_s: float
) -> str:
    """Describe a hang in which no rank has done a step for ``quiet_s``.

    It names who is missing, and where the others wait; ``hosts`` has the ranks that run.
    """
    step = "" if reports.step is None else f" after step {reports.step}"
    lines = [f"the job hangs: no rank has done a step for {quiet_s:.0f} s{step}"]
    # Agents connect in any order.
    ranks_here = sorted(hosts)
    latest = {rank: reports.latest.get(rank, RankReport()) for rank in ranks_here}
    waiting = {rank: state.waiting_in for rank, state in latest.items() if state.waiting_in}
    absent = missing(reports, ranks_here, stopped)
    lines += [f"missing: rank {rank} on {hosts[rank]}: {why}" for rank, why in absent.items()]
    operations: dict[str, list[int]] = {}
    for rank, operation in waiting.items():
        if rank not in absent:
            operations.setdefault(operation, []).append(rank)
    for operation, ranks in list(operations.items())[:_MOST_OPERATIONS]:
        lines.append(f"rank {listing(ranks)} waits in {operation}{_next_step(latest, ranks)}")
    if len(operations) > _MOST_OPERATIONS:
        lines.append(f"... and in {len(operations) - _MOST_OPERATIONS} other operations")
    if not waiting and not absent:
        lines.append("no rank waits for another: look at the stacks for what they do instead")
    if not absent and len(operations) > 1:
        lines.append("the ranks are in different operations: the program differs between them")
    return "\n".join(lines)


def _next_step(latest: Mapping[int, RankReport], ranks: Sequence[int]) -> str:
    done = {latest[rank].step for rank in ranks}
    step = next(iter(done))
    return f" of step {step + 1}" if len(done) == 1 and step is not None else ""
