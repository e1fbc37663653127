"""Resource usage of a rank's program: memory, processor time and GPUs of its processes.

NVIDIA's driver reports the GPUs (NVML). Whether a process is stopped is noticed in passing.
"""

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

__all__ = ["UNKNOWN", "Gpu", "GpuUsage", "GpuWatch", "UsageWatch", "gpus_of", "own_gpu"]

INTERVAL_S = 5.0
# The driver answers within milliseconds, or, where a GPU is broken, perhaps never.
PATIENCE_S = 0.2

# Utilization of a rank's GPUs in percent, and the GPU memory in bytes that it uses, if known.
GpuUsage = tuple[float | None, int | None]
UNKNOWN: GpuUsage = (None, None)


class UsageWatch:
    """Measures a program and its children periodically.

    Args:
        gpus: Measures their GPUs.
    """

    def __init__(self, gpus: GpuWatch) -> None:
        self._gpus = gpus
        self._due_s = time.monotonic() + INTERVAL_S
        self._before: dict[int, float] = {}
        self._looked_s = time.monotonic()

    def look(self, pid: int) -> Usage | None:
        """Return usage of process ``pid`` and its children; None if not due or without psutil."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + INTERVAL_S
        try:
            # Only here: ranks that end before never pay for it.
            import psutil
        except ImportError:
            # A host whose environment is older; what is only shown ends no job.
            self._due_s = math.inf
            return None
        rss, busy_s, stopped = 0, {}, False
        with contextlib.suppress(psutil.Error):
            program = psutil.Process(pid)
            for process in [program, *program.children(recursive=True)]:
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    busy_s[process.pid] = times.user + times.system
                    rss += process.memory_info().rss
                    stopped |= is_stopped(process.pid)
        # A process that has ended takes its time with it.
        spent_s = sum(max(0.0, s - self._before.get(one, 0.0)) for one, s in busy_s.items())
        since_s, self._looked_s, self._before = now_s - self._looked_s, now_s, busy_s
        gpu, gpu_bytes = self._gpus.look(busy_s.keys())
        return Usage(
            rss_bytes=rss,
            cpu=round(spent_s / since_s, 3),
            gpu=gpu,
            gpu_bytes=gpu_bytes,
            stopped=stopped,
        )


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of this host.

    Attributes:
        number: Its number, from 0.
        uuid: Its own id.
        busy: Utilization in the last second or less, in percent; None if unknown, as for a
            partitioned GPU (MIG).
        used_bytes: Memory in use by all processes.
        processes: Memory in bytes of each process that computes there, by its number.
    """

    number: int
    uuid: str
    busy: int | None
    used_bytes: int
    processes: Mapping[int, int] = field(default_factory=dict)


def own_gpu(environ: Mapping[str, str], local_rank: int, local_size: int) -> str:
    """Return the GPU of a rank by its variables, as a number or id; "" if they don't name it.

    A launcher shows each rank its own GPU, or all GPUs to all ranks of a host, which take one each
    in the order of their local ranks (``hvdtrain.tensorflow.devices.assign_gpus``).
    """
    shown = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if len(shown) > 1:
        return shown[local_rank] if len(shown) >= local_size else ""
    return shown[0]


def gpus_of(gpus: Sequence[Gpu], pids: Collection[int], own: str) -> GpuUsage:
    """Return the GPU usage of processes ``pids``.

    In a container the driver may know processes by other numbers. Then the whole usage of the
    rank's ``own`` GPU counts. If it is given by number, this is wrong on hosts with several kinds
    of GPUs, which CUDA counts in another order than the driver.
    """
    mine = [gpu for gpu in gpus if not gpu.processes.keys().isdisjoint(pids)]
    if mine:
        taken = sum(gpu.processes.get(pid, 0) for gpu in mine for pid in pids)
    else:
        # An id may be cut short.
        mine = [gpu for gpu in gpus if own and (own == str(gpu.number) or _begins(gpu.uuid, own))]
        taken = sum(gpu.used_bytes for gpu in mine)
    if not mine:
        return UNKNOWN
    busy = [gpu.busy for gpu in mine if gpu.busy is not None]
    return round(sum(busy) / len(busy), 1) if busy else None, taken


def _begins(uuid: str, own: str) -> bool:
    return own.startswith("GPU-") and uuid.startswith(own)


class GpuWatch:
    """Asks the driver of this host's GPUs, if any, and waits only briefly.

    Args:
        own: What ``own_gpu`` returned for the rank.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._found = UNKNOWN
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._absent = False

    def look(self, pids: Collection[int]) -> GpuUsage:
        """Return the GPU usage of these processes now, or ``UNKNOWN`` if the driver is slow."""
        if self._absent or (self._thread is not None and self._thread.is_alive()):
            return UNKNOWN
        self._found = UNKNOWN
        # What is only shown must not hold up the agent, which may be told to end its rank.
        self._thread = threading.Thread(target=self._ask, args=(pids,), name="nvml", daemon=True)
        self._thread.start()
        self._thread.join(PATIENCE_S)
        return self._found

    def _ask(self, pids: Collection[int]) -> None:
        try:
            # Only here: hosts without GPUs may lack it.
            import pynvml
        except ImportError:
            self._absent = True
            return
        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            self._found = gpus_of(list(_gpus(pynvml)), pids, self._own)
        except pynvml.NVMLError:
            # Without a driver there will be none later; a GPU that is lost may come back.
            self._absent = self._nvml is None


def _gpus(nvml: Any) -> Iterator[Gpu]:
    """Yield the GPUs that the driver reports.

    Raises:
        pynvml.NVMLError: It can't.
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
                one.pid: one.usedGpuMemory or 0
                for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            },
        )
