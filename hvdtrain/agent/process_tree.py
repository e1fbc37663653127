"""Finds and kills descendants of a process, and guards an agent.

mpirun may kill its ranks with SIGKILL, and a killed process can't clean up. So the process that
mpirun starts is only a guard. Its child does the work in a separate process group, where mpirun's
signals don't reach it. If one of the two processes dies, the other one cleans up.
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
    """Return the descendants of ``leader``.

    If ``leader`` leads a session, the result includes all other processes of this session.
    """
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
    """Send SIGKILL to these processes, and skip processes that do not exist any more."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants(leader: int, timeout_s: float = 2.0) -> None:
    """Kill all descendants of ``leader``, including processes that are forked during this call."""
    deadline = time.monotonic() + timeout_s
    while (pids := descendants(leader)) and time.monotonic() < deadline:
        kill_all(pids)
        time.sleep(0.01)


def shell_code(code: int) -> int:
    """Convert an exit code of ``subprocess`` to one of a shell: -9 (SIGKILL) becomes 137."""
    return 128 - code if code < 0 else code


def process_state(pid: int) -> str:
    """Return the state letter that ps shows, such as R, S, D or T; empty if the process is gone."""
    try:
        return _fields(Path(f"/proc/{pid}/stat"))[0]
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    return process_state(pid) in ("t", "T")


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if the process does not exist."""
    try:
        return int(_fields(Path(f"/proc/{pid}/stat"))[19])
    except OSError:
        return 0


def run_guarded(work: Callable[[int], int]) -> int:
    """Run ``work`` in a child, pass signals on to the child, and kill its descendants at the end.

    Args:
        work: Function that receives a file descriptor. Reading from the descriptor reports the end
            of the file once this process has died.

    Returns:
        The result of ``work``, or 128 + the number of the signal that ended the child.
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
    """Make this process the parent of its orphaned descendants, so that they can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _lead_group() -> None:
    """Shield this process from signals to its parent's process group.

    The process stays in its session, because Linux divides the cores among sessions (sched(7),
    autogroup) and balances the load between sessions less well than within one. In a test with more
    ranks than cores, one session per rank reduced the updates per second by a fifth.
    """
    os.setpgid(0, 0)


def die_with_parent() -> None:
    """Lead a process group, and die with the parent. Call this in a child before exec."""
    _lead_group()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call Linux's ``prctl``. Does nothing on other systems."""
    import ctypes  # only agents need it

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _process_table() -> dict[int, tuple[int, int]]:
    """Return the parent and session of each process except zombies; empty outside Linux."""
    table: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = _fields(entry)
            if fields[0] != "Z":
                table[int(entry.parent.name)] = (int(fields[1]), int(fields[3]))
    return table


def _fields(stat: Path) -> list[str]:
    """Return the fields after a process's name, which may contain spaces and parentheses."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()
