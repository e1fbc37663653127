"""What was measured on: the machine, its load and the libraries, for the head of a report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from hvdtrain.agent.cpu_share import available_cores
from hvdtrain.version import __version__

__all__ = ["describe_machine", "machine_line", "resident_bytes", "resident_shared_bytes"]

_LIBRARIES = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "mpi4py")


def describe_machine() -> dict[str, object]:
    """This host now; the load says whether others were using it."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "memory_bytes": pages,
        "load": round(os.getloadavg()[0], 2),
        "libraries": {
            "hvdtrain": __version__,
            "python": platform.python_version(),
            **_installed(),
        },
    }


def machine_line(machine: dict[str, object]) -> str:
    """``describe_machine()`` for people."""
    memory_bytes, libraries = machine["memory_bytes"], machine["libraries"]
    assert isinstance(memory_bytes, int)
    assert isinstance(libraries, dict)
    versions = ", ".join(f"{name} {version}" for name, version in libraries.items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {memory_bytes / 2**30:.0f} GiB; "
        f"load {machine['load']} at the start\n{versions}"
    )


def resident_bytes() -> int:
    """Memory that this process occupies now (Linux; elsewhere 0)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_shared_bytes() -> int:
    """How much of ``resident_bytes`` is memory that processes share (Linux; elsewhere 0)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("RssShmem:"):
                return int(line.split()[1]) * 1024
    return 0


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _installed() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
