"""The first failure of a job and its description: pure functions of the agents' reports."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.agent.rank_report import FailureRecord, OomKills
from hvdtrain.cluster.ranges import counted
from hvdtrain.exit_codes import ExitCode, signal_name

__all__ = ["RankExit", "describe", "describe_loss", "exit_code", "first_failure"]


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
_SHOWN_LINES = 30
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
        title, shown = "last lines of stderr:", list(first.stderr[-_SHOWN_LINES:])
    if shown:
        lines += [title, *(f"  {line[:_SHOWN_CHARACTERS]}" for line in shown)]
    return "\n".join(lines)


def describe_loss(end: RankExit, step: int | None, left: int, *, enough: bool) -> str:
    """One line on a rank that was lost after ``step``, and on whether the ``left`` ones go on."""
    assert end.code is not None
    at = "" if step is None else f" after step {step}"
    ranks = counted(left, "rank")
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
