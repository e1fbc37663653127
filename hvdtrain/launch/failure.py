"""Which rank failed first, and what to say about it; pure functions of what the agents reported."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.agent.exit_codes import ExitCode, signal_name
from hvdtrain.agent.oom import OomKills

__all__ = [
    "End",
    "begins_traceback",
    "describe",
    "exception_name",
    "exit_code",
    "first_failure",
    "follows",
]


@dataclass(frozen=True, kw_only=True)
class End:
    """How one rank ended.

    Attributes:
        rank: Its number.
        host: Where it ran.
        code: Its exit code; None where its agent was lost without a word.
        stderr: Its last lines.
        was_signalled: Whether the launcher, mpirun or srun had told it to end before.
        failed_at: When it failed, in seconds of the launcher's clock.
        kills: What the kernel killed for lack of memory meanwhile; None where nobody looked.
    """

    rank: int
    host: str
    code: int | None
    stderr: Sequence[str] = ()
    was_signalled: bool = False
    failed_at: float = 0.0
    kills: OomKills | None = None


_KILLED = 128 + signal.SIGKILL
_CRASH = "Fatal Python error:"
_BEGINNINGS = ("Traceback (most recent call last)", _CRASH)
# A crash lists all extension modules: thousands of characters that nobody needs at the end.
_MODULES = "Extension modules:"
# What a rank says that ended because another one had: never the first failure.
_FOLLOWS = "PeerFailedError"
_HANGS = "CollectiveTimeoutError"
# What faulthandler prints of a rank that the others did not meet in MPI's start, where Python can
# say nothing; see hvdtrain.collectives.mpi_start.
_TIMED_OUT, _STARTING = "Timeout (", " in start_mpi"
# What hvdtrain.collectives.exit_hooks adds to a traceback. It knows better: TensorFlow turns errors
# between ranks into some of its own.
_VERDICT = re.compile(
    r"(?:[\d: -]+ )?(?:\[\d+\] )?hvdtrain: rank \d+ of \d+ (?:stops|failed: (\w+)):"
)
_MORE_MEMORY = (
    "take a smaller batch or fewer ranks on a host, or give each rank more memory (Slurm: --mem, "
    "--mem-per-cpu; containers: their limit)"
)
_MOST_LINES = 60
_FEW_LINES = 15


def begins_traceback(line: str) -> bool:
    """Whether a line of stderr is the first of a traceback or of a crash."""
    return line.startswith(_BEGINNINGS)


def first_failure(ends: Sequence[End]) -> End | None:
    """The failure that the others follow from."""
    failures = sorted((end for end in ends if end.code != 0), key=lambda end: end.failed_at)
    for unlikely in (
        lambda end: follows(end) or (end.was_signalled and not _own_words(end)),
        lambda end: end.code is None,
        lambda end: end.was_signalled,
    ):
        likely = [end for end in failures if not unlikely(end)]
        failures = likely or failures
    return failures[0] if failures else None


def follows(end: End) -> bool:
    """Whether a rank ended, by its own account, because another one had."""
    return exception_name(end.stderr) == _FOLLOWS


def exit_code(first: End | None) -> int:
    """What ``hvdtrain run`` exits with after ``first``."""
    if first is None:
        return 0
    if exception_name(first.stderr) == _HANGS:
        return ExitCode.HANG
    return _KILLED if first.code is None else first.code


def describe(first: End, what: str = "") -> str:
    """What went wrong, for the end of the output.

    Args:
        first: The first failure.
        what: What the rank is, where no other can take its place.
    """
    comma = f", {what}," if what else ""
    lines = [f"rank {first.rank} on {first.host}{comma} failed first: {_how(first)}"]
    lines += _about_memory(first)
    excerpt = _excerpt(first.stderr)
    if excerpt:
        lines.append("its last words:")
        lines += ["  " + line for line in excerpt]
    return "\n".join(lines)


def _how(end: End) -> str:
    if end.code is None:
        return (
            "the connection to it was lost; its host died, or its processes were killed (as those "
            "of a container may be that runs out of memory)"
        )
    if (name := signal_name(end.code)) is not None:
        who = _who_killed(end.kills or OomKills()) if end.code == _KILLED else ""
        return f"ended by signal {end.code - 128} ({name}){who}"
    if exception_name(end.stderr) == _HANGS:
        return f"it waited too long for other ranks; exit code {end.code}"
    return f"exit code {end.code}"


def _about_memory(end: End) -> list[str]:
    """What there is to know and to do where the kernel killed something for lack of memory."""
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
    """Whether it was the kernel, for lack of memory."""
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


def _own_words(end: End) -> bool:
    """Whether a rank wrote a traceback of its own making before it was told to end."""
    if any(line.startswith(_CRASH) for line in end.stderr):
        return True
    exception = exception_name(end.stderr)
    return exception not in ("", "KeyboardInterrupt", "SystemExit", _FOLLOWS)


def exception_name(lines: Sequence[str]) -> str:
    """The class of the exception that ends the last traceback; empty where there is none."""
    within = timed_out = False
    found = ""
    for line in lines:
        timed_out = timed_out or line.startswith(_TIMED_OUT)
        if begins_traceback(line):
            within = True
        elif timed_out and line.endswith(_STARTING):
            found = _HANGS
        elif verdict := _VERDICT.match(line):
            found = verdict[1] or _FOLLOWS
        elif within and (match := re.match(r"(?:\w+\.)*(\w+)(?::|$)", line)):
            found = match[1]
            within = False
    return found


def _excerpt(lines: Sequence[str]) -> list[str]:
    starts = [index for index, line in enumerate(lines) if begins_traceback(line)]
    if not starts:
        return list(lines[-_FEW_LINES:])
    shown = [line for line in lines[starts[0] :] if not line.startswith(_MODULES)]
    if len(shown) <= _MOST_LINES:
        return shown
    half = _MOST_LINES // 2
    return [*shown[:half], f"... {len(shown) - 2 * half} lines ...", *shown[-half:]]
