"""Measures the resources that a rank's processes use: memory, CPU time, and GPUs (with NVML)."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.agent.process_tree import is_stopped
from hvdtrain.agent.rank_report import Usage

__all__ = ["UNKNOWN", "Gpu", "GpuUsage", "GpuWatch", "UsageWatch", "gpu_usage", "own_gpu"]

INTERVAL_S = 5.0
# The driver answers within milliseconds, or never if a GPU is broken.
PATIENCE_S = 0.2

# Utilization of a rank's GPUs in percent, and its GPU memory in bytes, if known.
GpuUsage = tuple[float | None, int | None]
UNKNOWN: GpuUsage = (None, None)


class UsageWatch:
    """Measures a program and its children periodically.

    Args:
        gpus: Measures the use of GPUs.
    """

    def __init__(self, gpus: GpuWatch) -> None:
        self._gpus = gpus
        self._due_s = time.monotonic() + INTERVAL_S
        self._cpu_s: dict[int, float] = {}
        self._measured_s = time.monotonic()

    def look(self, pid: int) -> Usage | None:
        """Return the usage of a process and its children.

        Returns None if the last measurement is recent, or if psutil is not installed.
        """
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + INTERVAL_S
        try:
            # Imported here because many ranks end before their first measurement.
            import psutil
        except ImportError:
            # If this host has an older environment, continue without measurements.
            self._due_s = math.inf
            return None
        rss, cpu_s, stopped = 0, {}, False
        with contextlib.suppress(psutil.Error):
            program = psutil.Process(pid)
            for process in [program, *program.children(recursive=True)]:
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    cpu_s[process.pid] = times.user + times.system
                    rss += process.memory_info().rss
                    stopped |= is_stopped(process.pid)
        # Processes that have ended since the last measurement are left out.
        used_s = sum(max(0.0, s - self._cpu_s.get(one, 0.0)) for one, s in cpu_s.items())
        elapsed_s, self._measured_s, self._cpu_s = now_s - self._measured_s, now_s, cpu_s
        gpu, gpu_bytes = self._gpus.look(cpu_s.keys())
        return Usage(
            rss_bytes=rss,
            cpu=round(used_s / elapsed_s, 3),
            gpu=gpu,
            gpu_bytes=gpu_bytes,
            stopped=stopped,
        )


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of this host.

    Attributes:
        number: Index of the GPU on this host.
        uuid: ID of the GPU.
        busy: Utilization in the last second in percent; None if unknown, as with MIG.
        used_bytes: Memory in use by all processes.
        processes: Memory in bytes that each process uses, by process ID.
    """

    number: int
    uuid: str
    busy: int | None
    used_bytes: int
    processes: Mapping[int, int] = field(default_factory=dict)


def own_gpu(environ: Mapping[str, str], local_rank: int, local_size: int) -> str:
    """Return the index or ID of a rank's GPU from its environment; empty if unknown.

    A launcher shows each rank only its own GPU, or it shows all of a host's GPUs to all ranks on
    the host. In that case, ranks use the GPUs in the order of their local ranks
    (``hvdtrain.tensorflow.devices.assign_gpus``).
    """
    visible = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if len(visible) > 1:
        return visible[local_rank] if len(visible) >= local_size else ""
    return visible[0]


def gpu_usage(gpus: Sequence[Gpu], pids: Collection[int], own: str) -> GpuUsage:
    """Return how much some processes use the GPUs.

    In a container, the driver may know the processes by different IDs. The result is then the total
    usage of the rank's ``own`` GPU. If ``own`` is an index, this may be the wrong GPU on hosts with
    different models of GPUs, because CUDA and the driver order those differently.
    """
    matches = [gpu for gpu in gpus if not gpu.processes.keys().isdisjoint(pids)]
    if matches:
        used_bytes = sum(gpu.processes.get(pid, 0) for gpu in matches for pid in pids)
    else:
        # IDs may be abbreviated.
        is_id = own.startswith("GPU-")
        matches = [
            gpu for gpu in gpus if own == str(gpu.number) or (is_id and gpu.uuid.startswith(own))
        ]
        used_bytes = sum(gpu.used_bytes for gpu in matches)
    if not matches:
        return UNKNOWN
    busy = [gpu.busy for gpu in matches if gpu.busy is not None]
    return round(sum(busy) / len(busy), 1) if busy else None, used_bytes


class GpuWatch:
    """Queries the driver of this host's GPUs, with a short time-out.

    Args:
        own: The result of ``own_gpu`` for the rank.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._usage = UNKNOWN
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._is_absent = False

    def look(self, pids: Collection[int]) -> GpuUsage:
        """Return the GPU usage of some processes, or ``UNKNOWN`` if the driver is slow."""
        if self._is_absent or (self._thread is not None and self._thread.is_alive()):
            return UNKNOWN
        self._usage = UNKNOWN
        # The agent must stay responsive to requests to stop its rank.
        self._thread = threading.Thread(target=self._query, args=(pids,), name="nvml", daemon=True)
        self._thread.start()
        self._thread.join(PATIENCE_S)
        return self._usage

    def _query(self, pids: Collection[int]) -> None:
        try:
            # Hosts without GPUs may lack the package.
            import pynvml
        except ImportError:
            self._is_absent = True
            return
        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            self._usage = gpu_usage(list(_gpus(pynvml)), pids, self._own)
        except pynvml.NVMLError:
            # A missing driver stays missing, but a lost GPU may come back.
            self._is_absent = self._nvml is None


def _gpus(nvml: Any) -> Iterator[Gpu]:
    """Yield the GPUs of this host.

    Raises:
        pynvml.NVMLError: If the driver fails.
    """
    for number in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        busy: int | None = None
        with contextlib.suppress(nvml.NVMLError):
            busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        yield Gpu(
            number=number,
            uuid=str(nvml.nvmlDeviceGetUUID(handle)),
            busy=busy,
            used_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            processes={
                process.pid: process.usedGpuMemory or 0
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            },
        )
