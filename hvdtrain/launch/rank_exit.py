"""How ranks ended, and which of several failures came first. All functions are pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.agent.rank_report import FailureRecord, OomKills
from hvdtrain.exit_codes import ExitCode, signal_name
from hvdtrain.text import format_list, plural

__all__ = [
    "RankExit",
    "describe_failure",
    "describe_loss",
    "exit_code",
    "first_failure",
    "list_ranks",
]

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

        If the rank ended with an exception or an exit code, the others would probably fail in the
        same way.
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
        """Whether the rank's stderr shows that MPI ended it after a loss elsewhere."""
        return any(_PMIX_EVENT in line for line in self.stderr)

    @property
    def may_be_ended_by_mpi(self) -> bool:
        """Whether MPI may have ended the rank, judging by its stderr or its exit code.

        The exit code is considered because the last lines of stderr may be lost.
        """
        return self.ended_by_mpi or (self.code in _PMIX_EVENT_CODES and not self._has_own_failure)


def first_failure(ends: Sequence[RankExit]) -> RankExit | None:
    """Return the failure that caused the others, or None if no rank failed."""
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
    """Return the exit code of ``hvdtrain run`` after the failure ``first``, or 0 if it is None."""
    if first is None:
        return 0
    if first.timed_out:
        return ExitCode.HANG
    return _KILLED if first.code is None else first.code


def list_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_list(ranks)}"


def describe_failure(first: RankExit, role: str = "") -> str:
    """Describe the first failure, with the rank's role if no other rank can replace it."""
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
    """Describe a rank that was lost after ``step``, and whether the ``left`` ranks continue."""
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
