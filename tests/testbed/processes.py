"""Search for processes by environment, network namespace or session."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

__all__ = [
    "argv_of",
    "end_session",
    "in_networks",
    "kill_all",
    "listens",
    "network_of",
    "with_environment",
]

_TCP_LISTEN = "0A"


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def with_environment(marker: str) -> set[int]:
    """Return the other processes whose environment contains ``marker``."""
    needle = marker.encode()
    pids = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and needle in Path(f"/proc/{pid}/environ").read_bytes():
                pids.add(pid)
    return pids


def network_of(pid: int) -> int | None:
    """Return the network namespace of a process, or None if it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def in_networks(networks: Collection[int | None]) -> set[int]:
    """Return the processes in the given network namespaces."""
    return {pid for pid in _pids() if network_of(pid) in networks}


def argv_of(pid: int) -> tuple[str, ...]:
    """Return the command line of a process; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(text.decode(errors="replace").rstrip("\0").split("\0"))


def listens(pid: int, port: int) -> bool:
    """Return whether ``port`` accepts IPv4 connections in the process's network namespace."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return any(
        fields[3] == _TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port
        for fields in map(str.split, lines)
    )


def end_session(session: int, grace_s: float = 3.0) -> None:
    """End all processes of a session with SIGTERM and, after a grace period, SIGKILL."""
    _signal_all(_in_session(session), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _in_session(session) and time.monotonic() < deadline:
        time.sleep(0.02)
    kill_all(lambda: _in_session(session))


def kill_all(find: Callable[[], set[int]], timeout_s: float = 10.0) -> None:
    """Kill the processes that ``find`` returns, until it doesn't return any more.

    Raises:
        TimeoutError: If some processes remain after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while pids := find():
        if time.monotonic() > deadline:
            left = {pid: " ".join(argv_of(pid)) for pid in sorted(pids)}
            raise TimeoutError(f"processes remain {timeout_s:g} s after SIGKILL: {left}")
        _signal_all(pids, signal.SIGKILL)
        time.sleep(0.02)


def _in_session(session: int) -> set[int]:
    """Return the living processes of a session."""
    found = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            # The process name in parentheses may contain spaces.
            state, _, _, sid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state not in "ZX":
                found.add(pid)
    return found


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
