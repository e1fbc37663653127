"""Description of the machine, its load and its libraries for reports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

from hvdtrain.cluster.placement import available_cores
from hvdtrain.config.keras_backend import configured_backend
from hvdtrain.text import plural
from hvdtrain.version import __version__

__all__ = [
    "describe_machine",
    "machine_line",
    "peak_resident_bytes",
    "release_free_memory",
    "resident_bytes",
    "resident_shared_bytes",
]

_LIBRARIES = ("tensorflow", "tensorflow-cpu", "torch", "jax", "keras", "numpy", "mpi4py")


def describe_machine() -> dict[str, object]:
    """Return processor, cores, memory, load and library versions of this host."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _value_in("/proc/cpuinfo", "model name")
        or platform.processor()
        or platform.machine(),
        "cores": available_cores(),
        "memory_bytes": pages,
        "load": round(os.getloadavg()[0], 2),
        "keras_backend": configured_backend(os.environ),
        "libraries": {
            "hvdtrain": __version__,
            "python": platform.python_version(),
            **_installed(),
        },
    }


def machine_line(machine: dict[str, object]) -> str:
    """Format the result of ``describe_machine()``."""
    memory_bytes, libraries = machine["memory_bytes"], machine["libraries"]
    assert isinstance(memory_bytes, int)
    assert isinstance(libraries, dict)
    versions = ", ".join(f"{name} {version}" for name, version in libraries.items())
    cores = plural(int(str(machine["cores"])), "core")
    return (
        f"{machine['processor']}, {cores}, {memory_bytes / 2**30:.0f} GiB; "
        f"load {machine['load']} at the start\n{versions}; Keras on {machine['keras_backend']}"
    )


def release_free_memory() -> None:
    """Return free memory of C's allocator to the system, if it is that of glibc.

    Afterwards, the resident memory doesn't depend on what the allocator keeps for later.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (0 outside Linux)."""
    return _memory_of_this_process("VmRSS")


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes (0 outside Linux)."""
    return _memory_of_this_process("VmHWM")


def resident_shared_bytes() -> int:
    """Return the shared part of ``resident_bytes`` (0 outside Linux)."""
    return _memory_of_this_process("RssShmem")


def _memory_of_this_process(key: str) -> int:
    kibibytes, _, _ = _value_in("/proc/self/status", key).partition(" ")
    return int(kibibytes or 0) * 1024


def _value_in(path: str, key: str) -> str:
    """Return the value of ``key`` in a file with lines "key: value"; empty if it is missing."""
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def _installed() -> dict[str, str]:
    # Slow to import.
    import importlib.metadata

    versions = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
