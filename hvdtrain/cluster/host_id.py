"""Which host this is."""

from __future__ import annotations

import socket
from pathlib import Path

__all__ = ["host_id"]


def host_id() -> str:
    """The same on all processes of a host, and different on another host or container.

    Names alone can repeat ("localhost"); so can the kernel's start, among containers.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()} {started}"
