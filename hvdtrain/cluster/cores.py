"""The cores that a process may use."""

from __future__ import annotations

import os

__all__ = ["available_cores", "core_numbers"]


def available_cores() -> int:
    """Cores that this process may run on: fewer than the machine has in many containers."""
    return len(core_numbers())


def core_numbers() -> set[int]:
    """Return the numbers of these cores."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
