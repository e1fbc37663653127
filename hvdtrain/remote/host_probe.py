"""The probe of ``hvdtrain check``, a program that prints facts about its host.

``python -m hvdtrain.remote.host_probe '{"names": ["node1"]}'`` takes a ``ProbeRequest`` and prints
``HostFacts``, both as JSON in one line. Facts that can't be determined are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.cluster.gpus import GpuReader, GpuState, read_states, visible_states
from hvdtrain.cluster.placement import available_cores
from hvdtrain.cluster.topology import host_id
from hvdtrain.config.keras_backend import configured_backend
from hvdtrain.errors import LaunchError
from hvdtrain.remote.keras_frameworks import FRAMEWORKS, IMPORT_TIMEOUT_S, count_gpus
from hvdtrain.remote.run_capture import find_mpi_library

__all__ = ["MARK", "HostFacts", "ProbeRequest", "installed_versions", "main", "read_facts"]

# The line with the facts starts with this, because login shells may print other lines.
MARK = "hvdtrain-check "

GPU_TIMEOUT_S = 15.0
NAMES_TIMEOUT_S = 8.0
CONNECT_TIMEOUT_S = 4.0
# A network file system may show a new file with a delay.
FOLDER_TIMEOUT_S = 2.0
MAX_LOOKUPS = 16
SIOCGIFADDR = 0x8915
# Packages to report, and the distributions that provide each.
_DISTRIBUTIONS = {
    "hvdtrain": ("hvdtrain",),
    **{name: framework.distributions for name, framework in FRAMEWORKS.items()},
    "keras": ("keras",),
    "mpi4py": ("mpi4py",),
}


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """The launcher's request to a probe."""

    names: tuple[str, ...] = ()  # names of all hosts, which the probe resolves
    folder: str = ""  # the launcher's working directory
    # name of a file that the launcher wrote to its working directory; empty if the directory isn't
    # writable
    token_file: str = ""
    token: str = ""  # content of that file
    addresses: tuple[str, ...] = ()  # addresses of the launcher on its route to this host
    port: int = 0  # port on which the launcher listens; 0 if it does not listen
    details: bool = False  # whether to collect the details for ``hvdtrain check --report``
    imports: bool = False  # whether to import the framework of Keras' backend


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts about a host. Unknown facts are None or empty."""

    machine: str = ""  # Unique ID of the machine. It does not depend on hostnames.
    started_s: float = 0.0  # the host's clock at the start of the probe
    ended_s: float = 0.0  # the host's clock at the end of the probe
    python: str = ""  # version of Python
    # versions of the installed packages, keyed by name
    versions: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""  # the backend that Keras uses
    backend_gpus: int | None = None  # number of GPUs that the backend's framework sees
    backend_error: str = ""  # why the backend's framework can't be imported
    mpi: str = ""  # name and version of the MPI library that mpi4py loads
    mpi_error: str = ""  # why mpi4py can't load an MPI library
    # whether this host has the launcher's working directory: ``same`` (it is shared), ``other`` (a
    # different directory has this path) or ``absent``
    folder: str = ""
    gpus: Sequence[GpuState] = ()  # the GPUs that ``CUDA_VISIBLE_DEVICES`` allows, or all GPUs
    gpu_error: str = ""  # why the driver or CUDA failed
    memlock_bytes: int | None = None  # limit for locked memory; -1 if unlimited
    infiniband: Sequence[str] = ()  # InfiniBand devices
    shm_bytes: int | None = None  # size of /dev/shm
    shm_free_bytes: int | None = None  # free space in /dev/shm
    # Addresses of each host name. The list is empty if the name can't be resolved.
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    back_error: str = ""  # why the launcher can't be reached over TCP
    local_address: str = ""  # this host's address in a connection to the launcher
    interface: str = ""  # network interface with the address ``local_address``
    speed_mbit: int | None = None  # speed of the interface in Mbit/s
    cores: int | None = None  # number of available cores
    load: float | None = None  # load average of the last minute
    # text of each section for ``hvdtrain check --report``, if requested
    details: Mapping[str, str] = field(default_factory=dict)
    # why parts of the probe failed, keyed by the name of the part
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_gpus(self) -> list[GpuState]:
        """The GPUs that the driver has not lost."""
        return [gpu for gpu in self.gpus if gpu.id]


def _from_json(kind: type[Any], text: str) -> Any:
    """Create a dataclass instance from JSON, ignoring fields of other versions of hvdtrain."""
    known = {entry.name for entry in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in json.loads(text).items() if name in known})


def read_facts(output: str) -> HostFacts | None:
    """Return the facts in the output of a probe; None if the output does not contain facts."""
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError):
                facts: HostFacts = _from_json(HostFacts, text)
                return dataclasses.replace(facts, gpus=read_states(facts.gpus))
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts of the probe in parallel and print the facts."""
    started_s = time.time()
    # Ctrl-C must end the process at once: Python's own handler waits for threads, which may hang.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    argv = sys.argv[1:] if argv is None else argv
    request = _from_json(ProbeRequest, argv[0] if argv else "{}")
    facts: dict[str, Any] = {"started_s": started_s, "python": platform.python_version()}
    pool = ThreadPoolExecutor(len(_PARTS))
    parts = {name: pool.submit(part, request) for name, part in _PARTS.items()}
    wait(parts.values(), timeout=IMPORT_TIMEOUT_S + 1.0)
    errors: dict[str, str] = {}
    for name, part in parts.items():
        if not part.done():
            errors[name] = "no answer in time"
        elif (error := part.exception()) is not None:
            errors[name] = f"{type(error).__name__}: {error}"
        else:
            facts.update(part.result())
    # The launcher may have ended.
    with contextlib.suppress(OSError):
        print(MARK + json.dumps({**facts, "errors": errors, "ended_s": time.time()}), flush=True)
        sys.stderr.flush()
    # A thread that hangs, for example on a dead file server, must not keep the process alive.
    os._exit(0)


def installed_versions() -> dict[str, str]:
    """Return the versions of hvdtrain, Keras, frameworks and mpi4py that are installed."""
    import importlib.metadata

    from hvdtrain.version import __version__

    versions = {}
    for package, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                # The metadata of a package that pip has only half removed contains no version.
                if version := importlib.metadata.version(distribution):
                    versions[package] = version
                    break
    # hvdtrain may run from its source folder without being installed.
    versions.setdefault("hvdtrain", __version__)
    return versions


def _mpi(request: ProbeRequest) -> dict[str, Any]:
    try:
        return {"mpi": find_mpi_library()}
    except LaunchError as error:
        return {"mpi_error": str(error)}


def _framework(request: ProbeRequest) -> dict[str, Any]:
    backend = configured_backend(os.environ)
    if not request.imports or backend not in set(installed_versions()) & set(FRAMEWORKS):
        return {}
    try:
        return {"backend_gpus": count_gpus(backend)}
    except LaunchError as error:
        return {"backend_error": str(error)}


def _folder(request: ProbeRequest) -> dict[str, Any]:
    if not request.token_file:
        return {}
    path = Path(request.folder, request.token_file)
    deadline = time.monotonic() + FOLDER_TIMEOUT_S
    while path.parent.is_dir():
        if path.exists() and path.read_text() == request.token:
            return {"folder": "same"}
        if time.monotonic() > deadline:
            return {"folder": "other"}
        time.sleep(0.1)
    return {"folder": "absent"}


def _gpus(request: ProbeRequest) -> dict[str, Any]:
    try:
        states = visible_states(GpuReader().read(GPU_TIMEOUT_S), os.environ)
    except LaunchError as error:
        return {"gpu_error": str(error)}
    return {"gpus": [dataclasses.asdict(state) for state in states]}


def _memory(request: ProbeRequest) -> dict[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    limit = -1 if soft == resource.RLIM_INFINITY else soft
    facts: dict[str, Any] = {"memlock_bytes": limit, "infiniband": devices}
    if os.path.isdir("/dev/shm"):
        space = os.statvfs("/dev/shm")
        facts["shm_bytes"] = space.f_blocks * space.f_frsize
        facts["shm_free_bytes"] = space.f_bavail * space.f_frsize
    return facts


def _details(request: ProbeRequest) -> dict[str, Any]:
    if not request.details:
        return {}
    from hvdtrain.remote import host_details

    return {"details": host_details.collect()}


def _names(request: ProbeRequest) -> dict[str, Any]:
    """Resolve all host names. A name that takes too long is treated as unknown."""
    pool = ThreadPoolExecutor(MAX_LOOKUPS)
    lookups = {name: pool.submit(_addresses, name) for name in request.names}
    wait(lookups.values(), timeout=NAMES_TIMEOUT_S)
    return {"names": {name: one.result() if one.done() else [] for name, one in lookups.items()}}


def _addresses(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))[:4]


def _way_back(request: ProbeRequest) -> dict[str, Any]:
    """Connect to the launcher, as ranks' agents do, and return the interface that was used."""
    failures = []
    for address in request.addresses if request.port else ():
        try:
            with socket.create_connection((address, request.port), CONNECT_TIMEOUT_S) as connection:
                local = str(connection.getsockname()[0])
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
            continue
        interface = _interface(local.removeprefix("::ffff:"))
        return {
            "local_address": local,
            "interface": interface,
            "speed_mbit": _speed_mbit(interface),
        }
    return {"back_error": "; ".join(failures)}


def _interface(address: str) -> str:
    """Return the network interface with this address; empty if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                packed = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)[20:24]
            except OSError:
                continue
            if socket.inet_ntoa(packed) == address:
                return name
    return ""


def _speed_mbit(interface: str) -> int | None:
    try:
        speed = int(Path("/sys/class/net", interface, "speed").read_text())
    except (OSError, ValueError):
        return None
    # Virtual interfaces report -1.
    return speed if speed > 0 else None


_PARTS: dict[str, Callable[[ProbeRequest], dict[str, Any]]] = {
    "machine": lambda request: {"machine": host_id()},
    "load": lambda request: {"cores": available_cores(), "load": round(os.getloadavg()[0], 2)},
    "versions": lambda request: {
        "versions": installed_versions(),
        "backend": configured_backend(os.environ),
    },
    "import of Keras' backend": _framework,
    "MPI": _mpi,
    "folder": _folder,
    "GPUs": _gpus,
    "memory": _memory,
    "details": _details,
    "names": _names,
    "connection to the launcher": _way_back,
}

if __name__ == "__main__":
    sys.exit(main())
