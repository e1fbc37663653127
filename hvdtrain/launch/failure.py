"""Finds the outcome of an attempt: its cause, exit code and messages.

All functions are pure. Their input is the record of the attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hvdtrain.cluster.hosts import parse_hosts
from hvdtrain.errors import ConfigurationError
from hvdtrain.exit_codes import PREEMPTING, ExitCode, signal_name
from hvdtrain.launch.progress import JobProgress, Straggler, find_straggler
from hvdtrain.launch.rank_exit import (
    RankExit,
    describe_failure,
    exit_code,
    first_failure,
    list_ranks,
)
from hvdtrain.text import format_list

if TYPE_CHECKING:
    from hvdtrain.remote.problem import Problem
    from hvdtrain.remote.remote_probe import FailureKind, Method

__all__ = ["Cause", "JobRecord", "Outcome", "classify", "explain_start_failure", "is_preempted"]

_STARTER_LINES = 40

Cause = Literal[
    "done",  # every rank succeeded
    "ordered",  # hvdtrain run received a signal
    "preempted",  # ranks received a signal to save a checkpoint and exit
    "infrastructure",  # a process or host was lost, hangs, or did not start
    "exception",  # raised by the program
    "own code",  # the program chose its exit code
    "setup",  # what a restart can't change, such as a missing plug-in of Slurm
]


@dataclass(kw_only=True)
class JobRecord:
    """What the launcher records about a running attempt. Times are from the launcher's clock."""

    hosts: Mapping[int, str]  # the planned host of each rank
    ends: Sequence[RankExit]  # without lost ranks that the others survived
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
    """Return the first failure, leaving out ranks that were signalled before they ended.

    A signalled rank is still considered if it exited with the preemption code.
    """
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
    from hvdtrain.remote.problem import format_problem

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
    """Return the value of ``--mpi`` that srun rejected, if it did."""
    return next((m[1] for m in map(_SRUN_PLUGIN.match, record.starter_output) if m), None)


def _output(record: JobRecord) -> list[str]:
    """Return the lines that mpirun or srun printed, without blank lines, rules and repeats.

    If the output is long, only its beginning is returned.
    """
    lines = list(dict.fromkeys(line for line in record.starter_output if line.strip(" -=*")))
    left = len(lines) - _STARTER_LINES
    return lines if left <= 0 else [*lines[:_STARTER_LINES], f"... and {left} more lines"]


# Matches the start of ssh's own connection errors. It must not match the similar errors that MPI
# and the agents print about their connections in the same output.
_SSH = re.compile(r"ssh: |\S+: Permission denied \(|Host key verification failed|Received disc")
# Open MPI's lines about the host where it was started.
_LOCAL_LINE = re.compile(r"\[|\s*Local host:")
_SHELL_NOT_FOUND = re.compile(r"sh: .*: (No such file or directory|not found)$")
_SRUN_PLUGIN = re.compile(r"srun: error: Invalid MPI type '(.*?)'")
_SRUN_NOT_FOUND = re.compile(r"slurmstepd.*: error: (execve\(\): .*)")
# A task exits with ENOENT if its program does not exist.
_SRUN_TASK = re.compile(r"srun: error: (\S+): tasks? \S+: Exited with exit code 2$")


def explain_start_failure(
    lines: Sequence[str], hosts: Sequence[str], *, method: Method, python: str
) -> list[Problem]:
    """Find out why ranks did not start on ``hosts``, from the output of mpirun or srun.

    Only English messages are recognized.

    Returns:
        The problems. Empty if the output does not show the cause.
    """
    from hvdtrain.remote.problem import failure_problems
    from hvdtrain.remote.remote_probe import Answer, Failure

    causes = _srun_causes(lines) if method == "srun" else _ssh_causes(lines, python)
    answers: dict[tuple[str, FailureKind], Answer] = {}
    for naming_lines, kind, line in causes:
        for host in _named_hosts(naming_lines, hosts):
            answer = Answer(host=host, failure=Failure(kind=kind, message=line))
            answers.setdefault((host, kind), answer)
    return list(failure_problems(list(answers.values()), method=method, python=python))


def _ssh_causes(
    lines: Sequence[str], python: str
) -> Iterator[tuple[Sequence[str], FailureKind, str]]:
    """Yield the lines that name the hosts, the kind of failure, and the line that reports it."""
    from hvdtrain.remote.remote_probe import ssh_failure

    others = [line for line in lines if not _LOCAL_LINE.match(line)]
    for line in lines:
        kind = ssh_failure(line) if _SSH.match(line) else None
        if kind is not None:
            # An error about a host key does not name the host, but other lines may.
            yield others if kind == "host key" else [line], kind, line
        elif _SHELL_NOT_FOUND.search(line) and os.path.dirname(python) in line:
            # The program that was not found is Open MPI's helper, which is next to Python.
            yield others, "no Python", line


def _srun_causes(lines: Sequence[str]) -> Iterator[tuple[Sequence[str], FailureKind, str]]:
    errors = [match[1] for line in lines if (match := _SRUN_NOT_FOUND.match(line))]
    if errors:
        yield [line for line in lines if _SRUN_TASK.match(line)], "no Python", errors[0]


def _named_hosts(lines: Sequence[str], hosts: Sequence[str]) -> list[str]:
    names: set[str] = set()
    for line in lines:
        if match := _SRUN_TASK.match(line):
            with contextlib.suppress(ConfigurationError):
                names.update(host.name for host in parse_hosts(match[1]))
        names.update(word.strip(".:") for word in re.findall(r"[\w.:-]+", line))
    return [host for host in hosts if host in names]
