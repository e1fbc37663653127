"""The identity of a process, which tells it from another that got its number later."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.agent.process_tree import process_state, start_ticks

__all__ = ["ProcessIdentity", "is_alive", "own_identity", "send_signal"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process, told from all others that ever had its number.

    Attributes:
        host: The host's own name.
        pid: Its number there.
        started_ticks: When it started, in the kernel's ticks since the host did; 0 for unknown.
        boot_id: Which start of the host that was; empty for unknown.
    """

    host: str
    pid: int
    started_ticks: int = 0
    boot_id: str = ""


def own_identity() -> ProcessIdentity:
    """This process."""
    pid = os.getpid()
    return ProcessIdentity(
        host=socket.gethostname(), pid=pid, started_ticks=start_ticks(pid), boot_id=_boot_id()
    )


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether it still runs; None where only its own host can tell."""
    if process.host != socket.gethostname():
        return None
    if process.boot_id != _boot_id():
        return False
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
