"""The descendants of a process, ending them, and a pair of processes that watch each other.

mpirun may end its ranks by SIGKILL, and the process that it knows can't clean up then. So that
process is only a guard, and its child in a separate process group, out of mpirun's reach, does the
work. Each of the two adopts the orphans of the other.
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
    """Return the processes of the session that ``leader`` leads or led, and its descendants."""
    found: list[int] = []
    table = _process_table()
    while True:
        known = {leader, *found}
        more = [
            pid
            for pid, (parent, session) in table.items()
            if pid not in known and (session == leader or parent in known)
        ]
        if not more:
            return found
        found.extend(more)


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to each of them that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants(leader: int, timeout_s: float = 2.0) -> None:
    """Kill all descendants of ``leader``, including those forked meanwhile."""
    deadline = time.monotonic() + timeout_s
    while (left := descendants(leader)) and time.monotonic() < deadline:
        kill_all(left)
        time.sleep(0.01)


def shell_code(code: int) -> int:
    """Return an exit code of ``subprocess`` as a shell does: 128 + n after signal n."""
    return 128 - code if code < 0 else code


def process_state(pid: int) -> str:
    """Return the letter that ps shows: R runs, S and D wait, T is stopped; "" for no process."""
    try:
        return _fields(Path(f"/proc/{pid}/stat"))[0]
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a process does nothing, as by SIGSTOP or under a debugger."""
    return process_state(pid) in ("t", "T")


def start_ticks(pid: int) -> int:
    """Return a process's start, in ticks since the host's; 0 for no process."""
    try:
        return int(_fields(Path(f"/proc/{pid}/stat"))[19])
    except OSError:
        return 0


def run_guarded(work: Callable[[int], int]) -> int:
    """Run ``work`` in a child process; returns what it returned, or 128 + the signal it died of.

    Signals to this process are passed on to the child. When the child ends, its descendants are
    killed. ``work`` gets a file that reaches its end when this process dies.
    """
    adopt_orphans()
    lifeline, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
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
    """Become the parent of descendants whose parent dies, so that they can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _lead_group() -> None:
    """Keep signals to the caller's process group away from this process; in a child.

    It stays in its session. Linux gives each session the same share of the cores (sched(7),
    autogroup) and balances worse between sessions than within one: with one session per rank and
    more ranks than cores there were a fifth fewer updates per second.
    """
    os.setpgid(0, 0)


def die_with_parent() -> None:
    """Lead a process group, and die when the parent does; for a child before its exec."""
    _lead_group()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call Linux's ``prctl``; elsewhere a rank does without."""
    import ctypes  # only agents need it

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _process_table() -> dict[int, tuple[int, int]]:
    """Parent and session of every process that has not ended (Linux; elsewhere empty)."""
    table: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = _fields(entry)
            if fields[0] != "Z":
                table[int(entry.parent.name)] = (int(fields[1]), int(fields[3]))
    return table


def _fields(stat: Path) -> list[str]:
    """State, parent, group, session, ...; the name before them, in parentheses, may be anything."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()
