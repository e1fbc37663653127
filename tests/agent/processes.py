"""Assertions on the end of processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["alive", "assert_all_end"]


def alive(pid: int) -> bool:
    """Return whether a process runs; zombies don't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_all_end(pids: Sequence[int], within_s: float = 3.0) -> None:
    """Wait for the end of killed processes, which takes a while on a busy machine."""
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]
