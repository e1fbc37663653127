"""Whether processes are gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["alive", "assert_all_end"]


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; one that ended and waits to be reaped doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_all_end(pids: Sequence[int], within_s: float = 3.0) -> None:
    """Wait for them: on a busy machine who was killed takes a while to be gone."""
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]
