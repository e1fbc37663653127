"""Descendants of a process, and a pair of processes that clean up after each other.

mpirun may kill its ranks with SIGKILL, and a killed process can't clean up. So the process that
mpirun starts is only a guard. Its child does the work in a separate process group, out of mpirun's
reach. Each of the two adopts the orphans of the other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from hvdtrain.exit_codes import ENDING, PREEMPTING

__all__ = [
    "adopt_orphans",
    "descendants",
    "die_with_parent",
    "is_stopped",
    "kill_all",
    "kill_descendants",
    "process_state",
    "run_guarded",
    "shell_code",
    "start_ticks",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def descendants(leader: int) -> list[int]:
    """Return the descendants of ``leader``, and the processes of its session if it leads one."""
    pids: list[int] = []
    table = _process_table()
    while True:
        known = {leader, *pids}
        more = [
            pid
            for pid, (parent, session) in table.items()
            if pid not in known and (session == leader or parent in known)
        ]
        if not more:
            return pids
        pids.extend(more)


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to all of these processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants(leader: int, timeout_s: float = 2.0) -> None:
    """Kill all descendants of ``leader``, including ones that are forked meanwhile."""
    deadline = time.monotonic() + timeout_s
    while (pids := descendants(leader)) and time.monotonic() < deadline:
        kill_all(pids)
        time.sleep(0.01)


def shell_code(code: int) -> int:
    """Convert an exit code of ``subprocess`` to a shell's: 128 + n after signal n."""
    return 128 - code if code < 0 else code


def process_state(pid: int) -> str:
    """Return the state letter of ps, such as R, S, D or T; empty if there is no such process."""
    try:
        return _fields(Path(f"/proc/{pid}/stat"))[0]
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger."""
    return process_state(pid) in ("t", "T")


def start_ticks(pid: int) -> int:
    """Return a process's start in clock ticks since boot; 0 if there is no such process."""
    try:
        return int(_fields(Path(f"/proc/{pid}/stat"))[19])
    except OSError:
        return 0


def run_guarded(work: Callable[[int], int]) -> int:
    """Run ``work`` in a child process, pass signals on to it, and kill its descendants at the end.

    Args:
        work: Gets a file descriptor that reaches its end when this process dies.

    Returns:
        The result of ``work``, or 128 + the signal that ended the child.
    """
    adopt_orphans()
    lifeline, own_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(own_end)
        _lead_group()
        os._exit(work(lifeline))
    os.close(lifeline)

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (*ENDING, *PREEMPTING):
        signal.signal(number, pass_on)
    _, status = os.waitpid(child, 0)
    kill_descendants(os.getpid())
    return shell_code(os.waitstatus_to_exitcode(status))


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so they can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _lead_group() -> None:
    """Shield this process from signals to its parent's process group.

    It stays in the session: Linux shares the cores between sessions (sched(7), autogroup) and
    balances worse between than within sessions. With a session per rank and more ranks than cores,
    there were a fifth fewer updates per second.
    """
    os.setpgid(0, 0)


def die_with_parent() -> None:
    """Lead a process group and die with the parent; for a child before its exec."""
    _lead_group()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call Linux's ``prctl``; has no effect on other systems."""
    import ctypes  # only agents need it

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _process_table() -> dict[int, tuple[int, int]]:
    """Return parent and session of all processes except zombies; empty on other systems."""
    table: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = _fields(entry)
            if fields[0] != "Z":
                table[int(entry.parent.name)] = (int(fields[1]), int(fields[3]))
    return table


def _fields(stat: Path) -> list[str]:
    """Return state, parent, group, session, ... after the name, which may contain anything."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()
