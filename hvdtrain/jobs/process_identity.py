"""The identity of a process, which tells it from another that got its number later."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.agent.process_tree import process_state, start_ticks

__all__ = [
    "ProcessIdentity",
    "host_identity",
    "is_alive",
    "own_identity",
    "send_signal",
]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process, told from all others that ever had its number.

    Attributes:
        host: The host's own name.
        pid: Its number there.
        started_ticks: When it started, in the kernel's ticks since the host did; 0 for unknown.
        boot_id: Which start of the host that was; empty for unknown.
        pid_namespace: The PID namespace that has its number, as of a container; 0 for unknown.
    """

    host: str
    pid: int
    started_ticks: int = 0
    boot_id: str = ""
    pid_namespace: int = 0


def host_identity() -> str:
    """Return a name for this host that no other has: other machines may have the same hostname."""
    return f"{socket.gethostname().lower()}-{_boot_id()}"


def own_identity() -> ProcessIdentity:
    """This process."""
    pid = os.getpid()
    return ProcessIdentity(
        host=socket.gethostname(),
        pid=pid,
        started_ticks=start_ticks(pid),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
    )


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether it still runs; None if it can't be seen from here.

    That is so on other hosts, after a restart of this one, which another machine or container with
    the same hostname looks like, and in other PID namespaces of the same hostname.
    """
    if (process.host, process.boot_id) != (socket.gethostname(), _boot_id()):
        return None
    if process.pid_namespace not in (0, _pid_namespace()):
        return None
    # What has ended keeps its number until its parent has asked how.
    there = process_state(process.pid) not in ("", "Z", "X")
    return there and start_ticks(process.pid) == process.started_ticks


def send_signal(process: ProcessIdentity, number: int) -> bool:
    """Send it a signal, and no other with its number now; return whether it was there.

    Raises:
        PermissionError: It is another user's.
    """
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            # Whoever this handle means, it stays the same.
            if is_alive(process):
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> int:
    try:
        return _PID_NAMESPACE.stat().st_ino
    except OSError:
        return 0
