"""Finds the outcome of an attempt: which rank failed first, the cause, exit code and messages.

All functions are pure. Their input is the record of the attempt, and the exits of its ranks.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hvdtrain.agent.rank_report import FailureRecord, OomKills
from hvdtrain.exit_codes import PREEMPTING, ExitCode, signal_name
from hvdtrain.launch.progress import JobProgress, Straggler, find_straggler
from hvdtrain.text import format_list, plural

if TYPE_CHECKING:
    from hvdtrain.remote.remote_probe import Method

__all__ = [
    "Cause",
    "JobRecord",
    "Outcome",
    "RankExit",
    "classify",
    "describe_failure",
    "describe_loss",
    "exit_code",
    "first_failure",
    "is_preempted",
    "list_ranks",
]

_STARTER_LINES = 40
_SRUN_PLUGIN = re.compile(r"srun: error: Invalid MPI type '(.*?)'")
_KILLED = 128 + signal.SIGKILL
# Signals that report a crash. Nobody sends them to stop a program.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_STDERR_LINES = 30
_SHOWN_CHARACTERS = 500
# Printed by Open MPI when PMIx reports a loss. The exit code is then MPI_ERR_UNKNOWN if another
# rank was lost, and PMIX_ERR_LOST_CONNECTION (-61) if the rank's parent process was lost, such as
# slurmstepd.
_PMIX_EVENT = "An error occurred in PMIx Event Notification"
_PMIX_EVENT_CODES = (14, 256 - 61)
_MEMORY_ADVICE = (
    "reduce the batch size or the ranks per host, or raise the memory limit (Slurm: --mem, "
    "--mem-per-cpu)"
)

Cause = Literal[
    "done",  # every rank succeeded
    "ordered",  # hvdtrain run received a signal
    "preempted",  # ranks received a signal to save a checkpoint and exit
    "infrastructure",  # a process or host was lost, hangs, or did not start
    "exception",  # raised by the program
    "own code",  # the program chose its exit code
    "setup",  # what a restart can't change, such as a missing plug-in of Slurm
]


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int
    host: str
    code: int | None  # as a shell reports it; None if the connection to its agent was lost
    stderr: Sequence[str] = ()  # the last lines
    record: FailureRecord | None = None  # the failure that its program recorded
    was_signalled: bool = False  # whether the launcher, mpirun or srun had signalled it
    failed_at: float = 0.0  # in seconds of the launcher's clock
    kills: OomKills | None = None  # out-of-memory kills while it ran

    @property
    def is_loss(self) -> bool:
        """Whether an unexpected signal killed the rank. The other ranks may then continue.

        If the rank ended with an exception or an exit code, the other ranks would probably fail in
        the same way.
        """
        died = self.code is not None and signal_name(self.code) is not None
        return died and not self.was_signalled

    @property
    def follows(self) -> bool:
        """Whether the rank ended because another rank had failed."""
        return self.record is not None and self.record.kind == "follows"

    @property
    def timed_out(self) -> bool:
        """Whether the rank's program timed out waiting for other ranks."""
        return self.record is not None and self.record.kind == "hang"

    @property
    def _has_own_failure(self) -> bool:
        crashed = self.code is not None and self.code - 128 in _CRASHES
        return crashed or (self.record is not None and self.record.is_own)

    @property
    def ended_by_mpi(self) -> bool:
        """Whether the rank's stderr shows that MPI ended it because another rank was lost."""
        return any(_PMIX_EVENT in line for line in self.stderr)

    @property
    def may_be_ended_by_mpi(self) -> bool:
        """Whether MPI may have ended the rank, judging by its stderr or its exit code.

        The exit code is considered because the last lines of stderr may be lost.
        """
        return self.ended_by_mpi or (self.code in _PMIX_EVENT_CODES and not self._has_own_failure)


@dataclass(kw_only=True)
class JobRecord:
    """What the launcher records about a running attempt. Times are from the launcher's clock."""

    hosts: Mapping[int, str]  # the planned host of each rank
    ends: Sequence[RankExit]  # without lost ranks if the job has continued
    reports: JobProgress
    seen: Mapping[int, str] = field(default_factory=dict)  # the hosts of ranks that started
    critical: Mapping[int, str] = field(default_factory=dict)  # roles of irreplaceable ranks
    received: Sequence[int] = ()  # signals that hvdtrain run received while ranks ran
    hang: str = ""  # the description of the hang, if the job hung
    starter: str = "mpirun"  # or srun
    starter_code: int = 0
    starter_output: MutableSequence[str] = field(default_factory=list)
    start_timeout_s: float | None = None  # the start time-out, if it expired
    started_at: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an attempt. A field is None if it is unknown or does not apply."""

    code: int  # exit code for hvdtrain run
    cause: Cause
    messages: tuple[str, ...] = ()  # what to tell the user
    step: int | None = None  # the last step that any rank completed
    failed_after: int | None = None  # the last step of the rank that failed first
    saved: int | None = None  # step of the newest checkpoint
    lost_s: float = 0.0  # seconds since that checkpoint, or since the start
    resumed: int | None = None  # step of the checkpoint that the attempt resumed from
    samples: int | None = None  # number of samples trained on
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds in each phase
    waited: float | None = None  # fraction of training in which ranks waited for each other
    starved: float | None = None  # fraction of training in which ranks waited for their input
    straggler: Straggler | None = None
    straggler_host: str = ""
    lost_hosts: tuple[str, ...] = ()  # planned hosts that were lost or can't start ranks


def is_preempted(ends: Sequence[RankExit]) -> bool:
    """Return whether ranks exited with the preemption code before any rank failed.

    A rank that is exiting handles no signals any more, so a repeated preemption signal kills it.
    This kind of death is not a failure.
    """
    killed = {128 + number for number in PREEMPTING}
    first = _first_unsignalled([end for end in ends if end.code not in killed])
    return first is not None and first.code == ExitCode.PREEMPTED


def classify(record: JobRecord) -> Outcome:
    """Return the outcome of an attempt."""
    reports = record.reports
    code, cause, messages, unstartable = _verdict(record)
    first = first_failure(record.ends)
    failed = reports.latest.get(first.rank) if first is not None else None
    lost = [record.hosts[end.rank] for end in record.ends if end.code is None]
    phases = reports.phases.seconds(record.ended_at)
    waited, starved = reports.waits.shares(phases.get("training", 0.0))
    straggler = find_straggler(reports.paces.overall())
    return Outcome(
        code=code,
        cause=cause,
        messages=tuple(message for message in messages if message),
        step=reports.step,
        failed_after=failed.step if failed is not None else None,
        saved=reports.saved,
        lost_s=record.ended_at - (reports.saved_at or record.started_at),
        resumed=reports.resumed,
        samples=reports.samples,
        phases=phases,
        waited=waited,
        starved=starved,
        straggler=straggler,
        straggler_host=record.seen.get(straggler.rank, "") if straggler is not None else "",
        lost_hosts=tuple(dict.fromkeys([*lost, *unstartable])),
    )


def _verdict(record: JobRecord) -> tuple[int, Cause, Sequence[str], Sequence[str]]:
    """Return the exit code, the cause, the messages, and the hosts where ranks can't start."""
    first = first_failure(record.ends)
    missing = sorted(set(record.hosts) - set(record.seen))
    # A signal that arrives after all ranks have succeeded changes nothing.
    succeeded = record.ends and all(end.code == 0 and not end.was_signalled for end in record.ends)
    if record.received and (missing or not succeeded):
        return *_stopped(record), ()
    if record.hang:
        return ExitCode.HANG, "infrastructure", (), ()
    if is_preempted(record.ends):
        return ExitCode.PREEMPTED, "preempted", [_describe_preemption(record.reports)], ()
    # Ranks that were stopped because others did not start have not failed.
    if first is not None and not (missing and first.was_signalled):
        message = describe_failure(first, record.critical.get(first.rank, ""))
        return exit_code(first), _cause(first, record), [message], ()
    if missing:
        messages, unstartable = _explain_missing(record, missing)
        cause: Cause = "infrastructure" if _missing_plugin(record) is None else "setup"
        return ExitCode.CANNOT_START, cause, messages, unstartable
    if record.starter_code != 0:
        message = f"{record.starter} exited with code {record.starter_code}"
        return record.starter_code, "own code", ["\n".join([message, *_output(record)])], ()
    return 0, "done", (), ()


def _stopped(record: JobRecord) -> tuple[int, Cause, Sequence[str]]:
    number = record.received[0]
    message = f"the job was stopped by {signal.Signals(number).name}"
    if any(end.code == ExitCode.PREEMPTED for end in record.ends):
        message = _describe_preemption(record.reports, message)
    if number not in PREEMPTING:
        return 128 + number, "ordered", [message]
    first = _first_unsignalled([end for end in record.ends if end.code != ExitCode.PREEMPTED])
    return ExitCode.PREEMPTED, "ordered", [describe_failure(first) if first else "", message]


def _describe_preemption(reports: JobProgress, what: str = "preempted") -> str:
    at = "" if reports.step is None else f" at step {reports.step}"
    if reports.saved is None:
        checkpoint = ""
    elif reports.step is None or reports.saved >= reports.step:
        checkpoint = ", checkpoint saved"
    else:
        checkpoint = f", newest checkpoint from step {reports.saved}"
    return f"{what}{at}{checkpoint}; start the job again to resume"


def _first_unsignalled(ends: Sequence[RankExit]) -> RankExit | None:
    """Return the first failure, without ranks that were signalled, unless they were preempted."""
    return first_failure([e for e in ends if not e.was_signalled or e.code == ExitCode.PREEMPTED])


def _cause(first: RankExit, record: JobRecord) -> Cause:
    # Under srun, a rank that has lost its slurmstepd may show this only by its exit code.
    by_mpi = first.ended_by_mpi or (record.starter == "srun" and first.may_be_ended_by_mpi)
    lost = first.code is None or first.follows or by_mpi
    if lost or exit_code(first) == ExitCode.HANG or signal_name(first.code or 0) is not None:
        return "infrastructure"
    # A program that reports nothing does not record exceptions either. If it exits with code 1, as
    # Python does after an exception, assume an exception.
    raised = first.record is not None or first.rank not in record.reports.latest
    return "exception" if first.code == 1 and raised else "own code"


def _explain_missing(record: JobRecord, missing: Sequence[int]) -> tuple[list[str], list[str]]:
    """Return messages about ranks that did not start, and the hosts at fault, if known."""
    # Imported here because it is rarely needed and imports much of hvdtrain check.
    from hvdtrain.remote.problem import explain_start_failure, format_problem

    hosts = list(dict.fromkeys(record.hosts[rank] for rank in missing))
    late = f" within {record.start_timeout_s:g} s" if record.start_timeout_s is not None else ""
    messages = [f"{list_ranks(missing)} did not start{late} on {format_list(hosts)}"]
    method: Method = "srun" if record.starter == "srun" else "ssh"
    problems = explain_start_failure(
        record.starter_output, hosts, method=method, python=sys.executable
    )
    if problems:
        at_fault = {host for problem in problems for host in problem.hosts}
        messages.append("\n".join(map(format_problem, problems)))
        return messages, [host for host in hosts if host in at_fault]
    plugin = _missing_plugin(record)
    messages.append(
        "every host needs this Python and the program at the same paths, and must be reachable "
        "from here; 'hvdtrain check' tests that"
        if plugin is None
        else f"this Slurm has no plug-in --mpi={plugin}; set SLURM_MPI_TYPE to another one of "
        "srun --mpi=list, or name the hosts with -H to start through mpirun and ssh"
    )
    if lines := _output(record):
        messages.append(
            "\n".join([f"output of {record.starter}:", *("  " + line for line in lines)])
        )
    return messages, []


def _missing_plugin(record: JobRecord) -> str | None:
    """Return the value of ``--mpi`` that srun has rejected; None if it has not rejected any."""
    return next((m[1] for m in map(_SRUN_PLUGIN.match, record.starter_output) if m), None)


def _output(record: JobRecord) -> list[str]:
    """Return the first lines that mpirun or srun printed, without separators and repetitions."""
    lines = list(dict.fromkeys(line for line in record.starter_output if line.strip(" -=*")))
    left = len(lines) - _STARTER_LINES
    return lines if left <= 0 else [*lines[:_STARTER_LINES], f"... and {left} more lines"]


def first_failure(ends: Sequence[RankExit]) -> RankExit | None:
    """Return the failure that caused the other failures, or None if no rank failed."""
    failures = sorted((end for end in ends if end.code != 0), key=lambda end: end.failed_at)
    any_lost = any(end.code is None or end.is_loss for end in failures)
    for is_unlikely in (
        lambda end: end.may_be_ended_by_mpi and any_lost,
        lambda end: end.follows or (end.was_signalled and not end._has_own_failure),
        lambda end: end.ended_by_mpi,
        lambda end: end.code is None,
        lambda end: end.was_signalled,
    ):
        failures = [end for end in failures if not is_unlikely(end)] or failures
    return failures[0] if failures else None


def exit_code(first: RankExit | None) -> int:
    """Return the exit code of ``hvdtrain run`` after the failure ``first``; 0 if it is None."""
    if first is None:
        return 0
    if first.timed_out:
        return ExitCode.HANG
    return _KILLED if first.code is None else first.code


def list_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_list(ranks)}"


def describe_failure(first: RankExit, role: str = "") -> str:
    """Describe the first failure, with the rank's role if no other rank can replace the rank."""
    comma = f", {role}," if role else ""
    lines = [f"rank {first.rank} on {first.host}{comma} failed first: {_describe_exit(first)}"]
    kills = first.kills or OomKills()
    if first.code != _KILLED and kills.in_group:
        lines.append(f"earlier, the kernel killed another process in its cgroup: {_oom(kills)}")
    if kills.in_group or (first.code == _KILLED and kills.on_host):
        lines.append(_MEMORY_ADVICE)
    if first.record is not None and first.record.traceback:
        title, shown = "traceback:", first.record.traceback.splitlines()
    else:
        title, shown = "last lines of stderr:", list(first.stderr[-_STDERR_LINES:])
    if shown:
        lines += [title, *(f"  {line[:_SHOWN_CHARACTERS]}" for line in shown)]
    return "\n".join(lines)


def describe_loss(end: RankExit, step: int | None, left: int, min_np: int) -> str:
    """Describe that a rank was lost after ``step``, and whether the other ranks continue.

    ``left`` is the number of remaining ranks.
    """
    assert end.code is not None
    after = "" if step is None else f" after step {step}"
    memory = ", out of memory" if end.kills is not None and end.kills.in_group else ""
    if left >= min_np:
        others = f"{plural(left, 'rank')} continue{'s' if left == 1 else ''}"
    else:
        others = f"{plural(left, 'rank')} left, fewer than --min-np {min_np}"
    return (
        f"rank {end.rank} on {end.host} was lost ({signal_name(end.code)}{memory}){after}; {others}"
    )


def _describe_exit(end: RankExit) -> str:
    if end.code is None:
        return (
            "the connection to its agent was lost; its host died, or its processes were killed, "
            "for example by a container that ran out of memory"
        )
    if (name := signal_name(end.code)) is not None:
        reason = _kill_reason(end.kills or OomKills()) if end.code == _KILLED else ""
        return f"killed by signal {end.code - 128} ({name}){reason}"
    if end.ended_by_mpi:
        return f"MPI ended it after losing another rank or its parent; exit code {end.code}"
    if end.timed_out:
        return f"timed out waiting for other ranks; exit code {end.code}"
    return f"exit code {end.code}"


def _kill_reason(kills: OomKills) -> str:
    if kills.in_group:
        return f": {_oom(kills)}"
    if kills.on_host:
        return "; the host ran out of memory and its kernel killed a process, possibly this one"
    if 0 in (kills.in_group, kills.on_host):
        return "; the kernel reports no out-of-memory kill, so a user or a program sent it"
    return "; possibly out of memory: the kernel's counters can't be read (see dmesg there)"


def _oom(kills: OomKills) -> str:
    if kills.limit_bytes is None:
        return "out of memory (no cgroup limit was found, so perhaps the whole host)"
    return f"out of memory (cgroup limit {kills.limit_bytes >> 20} MiB)"
