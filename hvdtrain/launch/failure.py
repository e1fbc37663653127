"""How and why a job ended; pure functions of what the launcher saw."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.agent.rank_report import FailureRecord, OomKills
from hvdtrain.exit_codes import PREEMPTING, ExitCode, signal_name
from hvdtrain.launch.progress import JobProgress, Straggler, find_straggler
from hvdtrain.text import format_list, plural

__all__ = [
    "Cause",
    "JobRecord",
    "Outcome",
    "RankExit",
    "classify",
    "describe",
    "describe_loss",
    "exit_code",
    "first_failure",
    "preempted",
]


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The end of one rank.

    Attributes:
        rank: Its number.
        host: Its host.
        code: Its exit code; None if the connection to its agent was lost.
        stderr: The last lines of its stderr.
        record: The failure that its program recorded; None if it recorded none.
        was_signalled: Whether the launcher, mpirun or srun had told it to end before.
        failed_at: When it failed, in seconds of the launcher's clock.
        kills: Processes that the kernel killed for lack of memory meanwhile; None if unknown.
    """

    rank: int
    host: str
    code: int | None
    stderr: Sequence[str] = ()
    record: FailureRecord | None = None
    was_signalled: bool = False
    failed_at: float = 0.0
    kills: OomKills | None = None

    @property
    def follows(self) -> bool:
        """Whether it recorded that it ended because another rank had."""
        return self.record is not None and self.record.kind == "follows"

    @property
    def hung(self) -> bool:
        """Whether it recorded that it waited too long for other ranks."""
        return self.record is not None and self.record.kind == "hang"

    @property
    def has_own_failure(self) -> bool:
        """Whether it failed of itself, even if it was told to end."""
        crashed = self.code is not None and self.code - 128 in _CRASHES
        return crashed or (self.record is not None and self.record.is_own)

    @property
    def ended_by_mpi(self) -> bool:
        """Whether Open MPI ended it, having heard that another rank is gone, or what started it."""
        return any(_PMIX_EVENT in line for line in self.stderr)

    @property
    def may_be_ended_by_mpi(self) -> bool:
        """The same as far as its code tells, as its last words may be lost on their way."""
        return self.ended_by_mpi or (self.code in _PMIX_EVENT_CODES and not self.has_own_failure)

    @property
    def is_loss(self) -> bool:
        """Whether it died of something that says nothing about the others.

        A signal ended it, nobody had told it to end, and its host is there. An exception or an
        exit code is the program's own doing, and the same may happen to the next rank.
        """
        died = self.code is not None and signal_name(self.code) is not None
        return died and not self.was_signalled


_KILLED = 128 + signal.SIGKILL
# Signals that nobody sends to end a program.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_STDERR_LINES = 30
_SHOWN_CHARACTERS = 500
# What Open MPI says where PMIx tells of a loss, and what it ends with: MPI_ERR_UNKNOWN for that of
# another rank, PMIX_ERR_LOST_CONNECTION (-61) for that of what started it, such as slurmstepd.
_PMIX_EVENT = "An error occurred in PMIx Event Notification"
_PMIX_EVENT_CODES = (14, 256 - 61)
_MORE_MEMORY = (
    "take a smaller batch or fewer ranks on a host, or give each rank more memory (Slurm: --mem, "
    "--mem-per-cpu; containers: their limit)"
)


def first_failure(ends: Sequence[RankExit]) -> RankExit | None:
    """The failure that the others follow from."""
    failures = sorted((end for end in ends if end.code != 0), key=lambda end: end.failed_at)
    some_are_gone = any(end.code is None or end.is_loss for end in failures)
    for unlikely in (
        lambda end: end.may_be_ended_by_mpi and some_are_gone,
        lambda end: end.follows or (end.was_signalled and not end.has_own_failure),
        lambda end: end.ended_by_mpi,
        lambda end: end.code is None,
        lambda end: end.was_signalled,
    ):
        likely = [end for end in failures if not unlikely(end)]
        failures = likely or failures
    return failures[0] if failures else None


def exit_code(first: RankExit | None) -> int:
    """Return the exit code of ``hvdtrain run`` after the failure ``first``; 0 for None."""
    if first is None:
        return 0
    if first.hung:
        return ExitCode.HANG
    return _KILLED if first.code is None else first.code


def describe(first: RankExit, what: str = "") -> str:
    """Tell what went wrong first; ``what`` is the rank's role, if no other can take its place."""
    comma = f", {what}," if what else ""
    lines = [f"rank {first.rank} on {first.host}{comma} failed first: {_how(first)}"]
    lines += _about_memory(first)
    if first.record is not None and first.record.traceback:
        title, shown = "traceback:", first.record.traceback.splitlines()
    else:
        title, shown = "last lines of stderr:", list(first.stderr[-_STDERR_LINES:])
    if shown:
        lines += [title, *(f"  {line[:_SHOWN_CHARACTERS]}" for line in shown)]
    return "\n".join(lines)


def describe_loss(end: RankExit, step: int | None, left: int, *, enough: bool) -> str:
    """One line on a rank that was lost after ``step``, and on whether the ``left`` ones go on."""
    assert end.code is not None
    at = "" if step is None else f" after step {step}"
    ranks = plural(left, "rank")
    memory = ", for lack of memory" if end.kills is not None and end.kills.in_group else ""
    goes_on = f"{ranks} {'goes' if left == 1 else 'go'} on" if enough else f"{ranks} left: too few"
    return (
        f"rank {end.rank} on {end.host} was lost ({signal_name(end.code)}{memory}){at}; {goes_on}"
    )


def _how(end: RankExit) -> str:
    if end.code is None:
        return (
            "the connection to it was lost; its host died, or its processes were killed (as those "
            "of a container may be that runs out of memory)"
        )
    if (name := signal_name(end.code)) is not None:
        who = _who_killed(end.kills or OomKills()) if end.code == _KILLED else ""
        return f"ended by signal {end.code - 128} ({name}){who}"
    if end.ended_by_mpi:
        return f"MPI ended it, as another rank or what started it was gone; exit code {end.code}"
    if end.hung:
        return f"it waited too long for other ranks; exit code {end.code}"
    return f"exit code {end.code}"


def _about_memory(end: RankExit) -> list[str]:
    """Tell what to know and to do where the kernel killed something for lack of memory."""
    kills = end.kills or OomKills()
    if end.code == _KILLED:
        return [_MORE_MEMORY] if kills.in_group or kills.on_host else []
    if not kills.in_group:
        return []
    return [
        f"before, the kernel killed a process in its cgroup for lack of memory ({_room(kills)})",
        _MORE_MEMORY,
    ]


def _room(kills: OomKills) -> str:
    if kills.limit_bytes is None:
        return "its cgroup shows no limit, so the host's may have run out"
    return f"limit of its cgroup: {kills.limit_bytes >> 20} MiB"


def _who_killed(kills: OomKills) -> str:
    """Tell whether it was the kernel, for lack of memory, or somebody else, as far as is known."""
    if kills.in_group:
        return f": killed by the kernel for lack of memory ({_room(kills)})"
    if kills.on_host:
        return (
            "; the kernel killed a process on that host for lack of memory meanwhile, perhaps "
            "this one"
        )
    if 0 in (kills.in_group, kills.on_host):
        return "; by a person or a program, not by the kernel for lack of memory"
    return (
        "; the kernel does that when memory runs out, but its counts can't be read there (dmesg "
        "on the host may tell)"
    )


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
    from hvdtrain.remote.problem import format_problem

    hosts = list(dict.fromkeys(record.hosts[rank] for rank in missing))
    name = record.starter_name
    late = f" within {record.start_timeout_s:g} s" if record.late else ""
    words = [f"rank {format_list(missing)} did not start{late} on {format_list(hosts)}"]
    method: Literal["srun", "ssh"] = "srun" if name == "srun" else "ssh"
    problems = explain_start_failure(record.words, hosts, method=method, python=sys.executable)
    if problems:
        named = {host for problem in problems for host in problem.hosts}
        words.append("\n".join(map(format_problem, problems)))
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
