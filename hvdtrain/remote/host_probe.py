"""Runs on a host that ``hvdtrain check`` looks at, and prints what it finds as one line of JSON.

``python -m hvdtrain.remote.host_probe '{"names": ["node1"]}'``: the argument is a ``Question``, the
line a ``Facts``. Whatever can't be found out is left out; nothing of that ends the probe.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from hvdtrain.cluster.placement import available_cores
from hvdtrain.cluster.topology import host_id
from hvdtrain.errors import LaunchError
from hvdtrain.remote.probe_messages import MARK, Question, read_question
from hvdtrain.remote.run_capture import MPI_TIMEOUT_S, find_mpi_library, run_capture

__all__ = ["installed_versions", "main"]

GPU_TIMEOUT_S = 15.0
NAMES_TIMEOUT_S = 8.0
CONNECT_TIMEOUT_S = 4.0
# A file system over the network may show a new file a little later.
FOLDER_TIMEOUT_S = 2.0
LOOKUPS_AT_ONCE = 16
SIOCGIFADDR = 0x8915
# The packages whose versions count, and the names under which each is installed.
_DISTRIBUTIONS = {
    "hvdtrain": ("hvdtrain",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tensorflow-aarch64"),
    "keras": ("keras",),
    "mpi4py": ("mpi4py",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the question in ``argv``."""
    started_s = time.time()
    # Ended at once by Ctrl-C: Python would wait for the threads of the pool, which may hang.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    argv = sys.argv[1:] if argv is None else argv
    question = read_question(argv[0] if argv else "{}")
    facts: dict[str, Any] = {"started_s": started_s, "python": platform.python_version()}
    # Each waits for something else: a network, a process, a file system.
    pool = ThreadPoolExecutor(len(_PARTS))
    parts = {name: pool.submit(find, question) for name, find in _PARTS.items()}
    wait(parts.values(), timeout=MPI_TIMEOUT_S + 1.0)
    errors: dict[str, str] = {}
    for name, part in parts.items():
        if not part.done():
            errors[name] = "no answer in time"
        elif (error := part.exception()) is not None:
            errors[name] = f"{type(error).__name__}: {error}"
        else:
            facts.update(part.result())
    answer = {**facts, "errors": errors, "ended_s": time.time()}
    # Whoever asked may have gone.
    with contextlib.suppress(OSError):
        print(MARK + json.dumps(answer), flush=True)
        sys.stderr.flush()
    # A thread that hangs, on a dead file server for instance, must not keep the process.
    os._exit(0)


def _machine(question: Question) -> dict[str, Any]:
    return {"hostname": socket.gethostname(), "machine": host_id()}


def _load(question: Question) -> dict[str, Any]:
    return {"cores": available_cores(), "load": round(os.getloadavg()[0], 2)}


def installed_versions() -> dict[str, str]:
    """The packages that count and are installed, by TensorFlow's and their other usual names."""
    import importlib.metadata

    found = {}
    for package, names in _DISTRIBUTIONS.items():
        for name in names:
            try:
                found[package] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    if "hvdtrain" not in found:
        # Run from its folder, without having been installed.
        from hvdtrain.version import __version__

        found["hvdtrain"] = __version__
    return found


def _versions(question: Question) -> dict[str, Any]:
    return {"versions": installed_versions()}


def _mpi(question: Question) -> dict[str, Any]:
    try:
        return {"mpi": find_mpi_library()}
    except LaunchError as error:
        return {"mpi_error": str(error)}


def _folder(question: Question) -> dict[str, Any]:
    if not question.token_file:
        return {}
    path = Path(question.folder, question.token_file)
    deadline = time.monotonic() + FOLDER_TIMEOUT_S
    while path.parent.is_dir():
        if path.exists() and path.read_text() == question.token:
            return {"folder": "same"}
        if time.monotonic() > deadline:
            return {"folder": "other"}
        time.sleep(0.1)
    return {"folder": "absent"}


def _gpus(question: Question) -> dict[str, Any]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    argv = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        reply = run_capture(argv, timeout_s=GPU_TIMEOUT_S)
    except LaunchError as error:
        return {"gpu_error": str(error)}
    lines = reply.text.strip().splitlines()
    if reply.code != 0:
        return {"gpu_error": lines[0] if lines else f"nvidia-smi: exit code {reply.code}"}
    rows = [[cell.strip() for cell in line.rpartition(",")[::2]] for line in lines if "," in line]
    return {"gpus": rows}


def _memory(question: Question) -> dict[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    limit = -1 if soft == resource.RLIM_INFINITY else soft
    found: dict[str, Any] = {"memlock_bytes": limit, "infiniband": devices}
    if os.path.isdir("/dev/shm"):
        space = os.statvfs("/dev/shm")
        found["shm_bytes"] = space.f_blocks * space.f_frsize
        found["shm_free_bytes"] = space.f_bavail * space.f_frsize
    return found


def _names(question: Question) -> dict[str, Any]:
    """Resolve all names, several at once; what takes too long counts as unknown."""
    pool = ThreadPoolExecutor(LOOKUPS_AT_ONCE)
    lookups = {name: pool.submit(_addresses, name) for name in question.names}
    wait(lookups.values(), timeout=NAMES_TIMEOUT_S)
    return {"names": {name: one.result() if one.done() else [] for name, one in lookups.items()}}


def _addresses(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))[:4]


def _way_back(question: Question) -> dict[str, Any]:
    """Connect to the launcher, as every rank's agent does, and see which interface that takes."""
    failures = []
    for address in question.addresses if question.port else ():
        try:
            with socket.create_connection((address, question.port), CONNECT_TIMEOUT_S) as way:
                local = str(way.getsockname()[0])
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
            continue
        interface = _interface(local.removeprefix("::ffff:"))
        return {
            "back": address,
            "local_address": local,
            "interface": interface,
            "speed_mbit": _speed_mbit(interface),
        }
    return {"back_error": "; ".join(failures)}


def _interface(address: str) -> str:
    """The network interface that has ``address``; empty where that can't be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                packed = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, packed)[20:24]
            except OSError:
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return ""


def _speed_mbit(interface: str) -> int | None:
    try:
        speed = int(Path("/sys/class/net", interface, "speed").read_text())
    except (OSError, ValueError):
        return None
    # Virtual interfaces say -1.
    return speed if speed > 0 else None


_PARTS: dict[str, Callable[[Question], dict[str, Any]]] = {
    "machine": _machine,
    "load": _load,
    "versions": _versions,
    "MPI": _mpi,
    "folder": _folder,
    "GPUs": _gpus,
    "memory": _memory,
    "names": _names,
    "way back": _way_back,
}

if __name__ == "__main__":
    sys.exit(main())
