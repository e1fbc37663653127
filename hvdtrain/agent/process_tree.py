"""All processes that descend from one, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "descendants",
    "is_stopped",
    "kill_all",
    "kill_descendants",
    "process_state",
    "shell_code",
    "start_ticks",
]


def descendants(leader: int) -> list[int]:
    """Processes of the session that ``leader`` leads or led, and all its descendants."""
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
    """SIGKILL for each of them that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants(leader: int, timeout_s: float = 2.0) -> None:
    """End whatever descends from ``leader``, also what is forked meanwhile."""
    deadline = time.monotonic() + timeout_s
    while (left := descendants(leader)) and time.monotonic() < deadline:
        kill_all(left)
        time.sleep(0.01)


def shell_code(code: int) -> int:
    """An exit code of ``subprocess`` as a shell gives it: 128 + n where signal n ended it."""
    return 128 - code if code < 0 else code


def process_state(pid: int) -> str:
    """One letter, as ps shows it: R runs, S and D wait, T is stopped; empty where there is none."""
    try:
        return _fields(Path(f"/proc/{pid}/stat"))[0]
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a process does nothing, as by SIGSTOP or under a debugger."""
    return process_state(pid) in ("t", "T")


def start_ticks(pid: int) -> int:
    """Return a process's start, in the kernel's ticks since the host's; 0 where there is none."""
    try:
        return int(_fields(Path(f"/proc/{pid}/stat"))[19])
    except OSError:
        return 0


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
