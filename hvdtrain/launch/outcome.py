"""The outcome of a job: how and why it ended; pure functions of what the launcher saw."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.cluster.ranges import listing
from hvdtrain.exit_codes import PREEMPTING, ExitCode, signal_name
from hvdtrain.launch.failure import RankExit, describe, exit_code, first_failure
from hvdtrain.launch.job_progress import JobProgress
from hvdtrain.launch.rank_pace import Straggler, find_straggler

__all__ = ["Cause", "JobRecord", "Outcome", "classify", "preempted"]

Cause = Literal[
    "done",  # every rank ended well
    "ordered",  # a signal at hvdtrain run
    "preempted",  # ranks saved what they had and left, as somebody told them
    "infrastructure",  # a process or host was lost, hangs, or did not start
    "exception",  # of the program
    "own code",  # the program ended itself with this exit code
]

# Of what mpirun or srun printed.
_SHOWN_LINES = 40


@dataclass(kw_only=True)
class JobRecord:
    """All that was seen of a job, noted while it runs.

    Attributes:
        hosts: The host of each rank, as planned.
        ends: The ends of all ranks but those that the others did without.
        reports: How far the ranks were.
        seen: The host of each rank that began, by its own name.
        critical: Roles of the ranks without which the others don't go on.
        received: Signals that came to ``hvdtrain run`` while ranks ran.
        hang: Says who hangs and where the others wait; empty where the job did not hang.
        starter: Path of mpirun or srun.
        starter_code: Its exit code, as a shell gives it.
        words: Lines that it printed.
        late: Whether ranks were waited for too long.
        start_timeout_s: How long that is.
        started_at: When the job began, by the clock of ``reports``.
        ended_at: When it was over.
    """

    hosts: Mapping[int, str]
    ends: Sequence[RankExit]
    reports: JobProgress
    seen: Mapping[int, str] = field(default_factory=dict)
    critical: Mapping[int, str] = field(default_factory=dict)
    received: Sequence[int] = ()
    hang: str = ""
    starter: str = "mpirun"
    starter_code: int = 0
    words: MutableSequence[str] = field(default_factory=list)
    late: bool = False
    start_timeout_s: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def starter_name(self) -> str:
        """The name of the program that starts the ranks."""
        return os.path.basename(self.starter)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one attempt to run the job.

    Attributes:
        code: The code that ``hvdtrain run`` exits with.
        cause: Why it ended.
        words: Says to the user how it ended.
        step: The last step that a rank reported; None for none.
        failed_after: The last step that the rank that failed first reported.
        saved: Step of the newest checkpoint; None for none.
        lost_s: Seconds since that checkpoint was written, or since the beginning.
        resumed: Step of the checkpoint that it began from; None for none.
        samples: On how many samples its ranks trained; None for unknown.
        phases: How long its chief was in each phase, in seconds.
        waited: The part of training for which ranks waited for each other; None for unknown.
        starved: The part of training for which ranks waited for their input; None for unknown.
        straggler: The rank that held the others up; None for none.
        straggler_host: Where that ran.
        lost_hosts: Hosts where agents were lost without a word, or can't be started, as they are
            called in the plan.
    """

    code: int
    cause: Cause
    words: tuple[str, ...] = ()
    step: int | None = None
    failed_after: int | None = None
    saved: int | None = None
    lost_s: float = 0.0
    resumed: int | None = None
    samples: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    waited: float | None = None
    starved: float | None = None
    straggler: Straggler | None = None
    straggler_host: str = ""
    lost_hosts: tuple[str, ...] = ()


def preempted(ends: Sequence[RankExit]) -> bool:
    """Whether ranks left with the code that asks for the same job again, before any failed.

    They do so together. A rank that is on its way out catches no signals any longer, and one that
    comes once more, by another way, ends it: that is no failure.
    """
    died = {128 + number for number in PREEMPTING}
    first = _first_unsignalled([end for end in ends if end.code not in died])
    return first is not None and first.code == ExitCode.PREEMPTED


def classify(record: JobRecord) -> Outcome:
    """Decide why the job ended, with which code, and what to say."""
    code, cause, words, absent = _why(record)
    first = first_failure(record.ends)
    failed = record.reports.latest.get(first.rank) if first is not None else None
    lost = [end for end in record.ends if end.code is None]
    since = record.reports.saved_at or record.started_at
    phases = record.reports.phases.seconds(record.ended_at)
    waited, starved = record.reports.waits.shares(phases.get("training", 0.0))
    straggler = find_straggler(record.reports.paces.in_all())
    return Outcome(
        code=code,
        cause=cause,
        words=tuple(word for word in words if word),
        step=record.reports.step,
        failed_after=failed.step if failed is not None else None,
        saved=record.reports.saved,
        lost_s=record.ended_at - since,
        resumed=record.reports.resumed,
        samples=record.reports.samples,
        phases=phases,
        waited=waited,
        starved=starved,
        straggler=straggler,
        straggler_host=record.seen.get(straggler.rank, "") if straggler is not None else "",
        lost_hosts=tuple(dict.fromkeys([*(record.hosts[end.rank] for end in lost), *absent])),
    )


def _why(record: JobRecord) -> tuple[int, Cause, Sequence[str], Sequence[str]]:
    """Code, cause, words, and hosts where ranks can't be started."""
    first = first_failure(record.ends)
    missing = sorted(set(record.hosts) - set(record.seen))
    if record.received and (missing or not _ended_well(record.ends)):
        return *_ordered(record), ()
    if record.hang:
        return ExitCode.HANG, "infrastructure", (), ()
    if preempted(record.ends):
        return ExitCode.PREEMPTED, "preempted", [_preemption(record.reports)], ()
    # Ranks that were told to end because others did not start have not failed.
    if first is not None and not (missing and first.was_signalled):
        told = describe(first, record.critical.get(first.rank, ""))
        return exit_code(first), _cause(first, record), [told], ()
    if missing:
        words, absent = _explain_missing(record, missing)
        return ExitCode.CANNOT_START, "infrastructure", words, absent
    if record.starter_code != 0:
        said = f"{record.starter_name} ended with code {record.starter_code}"
        return record.starter_code, "own code", ["\n".join([said, *_said(record)])], ()
    return 0, "done", (), ()


def _ended_well(ends: Sequence[RankExit]) -> bool:
    """Whether all ranks ended by themselves with code 0, so that a signal came too late."""
    return bool(ends) and all(end.code == 0 and not end.was_signalled for end in ends)


def _ordered(record: JobRecord) -> tuple[int, Cause, Sequence[str]]:
    """Return code, cause and words of a job that ends after a signal at ``hvdtrain run``."""
    number = record.received[0]
    told = f"the job was ended by {signal.Signals(number).name}"
    saved = any(end.code == ExitCode.PREEMPTED for end in record.ends)
    words = [_preemption(record.reports, told)] if saved else [told]
    if number not in PREEMPTING:
        return 128 + number, "ordered", words
    first = _first_unsignalled([end for end in record.ends if end.code != ExitCode.PREEMPTED])
    return ExitCode.PREEMPTED, "ordered", [describe(first) if first else "", *words]


def _preemption(reports: JobProgress, told: str = "preempted") -> str:
    at = "" if reports.step is None else f" at step {reports.step}"
    if reports.saved is None:
        checkpoint = ""
    elif reports.step is None or reports.saved >= reports.step:
        checkpoint = ", checkpoint saved"
    else:
        checkpoint = f", newest checkpoint of step {reports.saved}"
    return f"{told}{at}{checkpoint}; start it again to go on"


def _first_unsignalled(ends: Sequence[RankExit]) -> RankExit | None:
    """The first failure; those told to end count only if they left as preempted."""
    return first_failure([e for e in ends if not e.was_signalled or e.code == ExitCode.PREEMPTED])


def _cause(first: RankExit, record: JobRecord) -> Cause:
    assert first.code != 0
    # What MPI has to say goes through Slurm, and is lost where a part of that is gone.
    mute = record.starter_name == "srun"
    by_mpi = first.may_be_ended_by_mpi if mute else first.ended_by_mpi
    lost = first.code is None or first.follows or by_mpi
    if lost or exit_code(first) == ExitCode.HANG or signal_name(first.code or 0) is not None:
        return "infrastructure"
    # A program that reports nothing records no exception either, and 1 is Python's code after one.
    raised = first.record is not None or first.rank not in record.reports.latest
    return "exception" if first.code == 1 and raised else "own code"


def _explain_missing(record: JobRecord, missing: Sequence[int]) -> tuple[list[str], list[str]]:
    """Words on ranks that did not start, and the hosts that they tell to be at fault."""
    # Seldom needed, and much of hvdtrain check comes with them.
    from hvdtrain.launch.start_failure import explain_start_failure
    from hvdtrain.remote.problem import show_problem

    hosts = list(dict.fromkeys(record.hosts[rank] for rank in missing))
    name = record.starter_name
    late = f" within {record.start_timeout_s:g} s" if record.late else ""
    words = [f"rank {listing(missing)} did not start{late} on {listing(hosts)}"]
    way: Literal["srun", "ssh"] = "srun" if name == "srun" else "ssh"
    problems = explain_start_failure(record.words, hosts, way=way, python=sys.executable)
    if problems:
        named = {host for problem in problems for host in problem.hosts}
        words.append("\n".join(map(show_problem, problems)))
        return words, [host for host in hosts if host in named]
    words.append(
        "each host needs this Python and the program at the same path, and must be reached "
        "from here (hvdtrain check tells)"
    )
    if said := _said(record):
        words.append("\n".join([f"{name} said:", *("  " + line for line in said)]))
    return words, []


def _said(record: JobRecord) -> list[str]:
    """Return what mpirun or srun printed, without blank lines, rules and repeats; cut if long."""
    lines = list(dict.fromkeys(line for line in record.words if line.strip(" -=*")))
    left = len(lines) - _SHOWN_LINES
    return lines if left <= 0 else [*lines[:_SHOWN_LINES], f"... and {left} lines more"]
