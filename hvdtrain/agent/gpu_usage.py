"""GPU usage of a rank's program on its host, as NVIDIA's driver tells it (NVML)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Gpu", "GpuUsage", "GpuWatch", "gpus_of", "own_gpu"]

# The driver answers within milliseconds, or, where a GPU is broken, perhaps never.
PATIENCE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of this host.

    Attributes:
        number: Its number, from 0.
        uuid: Its own id.
        busy: For how much of the last second or less it computed, in percent; None where that
            can't be told, as of a GPU that is divided (MIG).
        used_bytes: Memory that is taken, by whomever.
        processes: Memory in bytes that each process takes that computes there, by its number.
    """

    number: int
    uuid: str
    busy: int | None
    used_bytes: int
    processes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """GPU usage of one rank.

    Attributes:
        gpu: For how much of the time they computed, in percent; None for unknown.
        gpu_bytes: Memory that it takes there.
    """

    gpu: float | None
    gpu_bytes: int


def own_gpu(environ: Mapping[str, str], local_rank: int, local_size: int) -> str:
    """The GPU that a rank's variables leave to it, by number or id; empty where they don't say.

    A launcher shows each rank its own, or all ranks of a host those of them all, of which they take
    one each in the order of their local ranks (``hvdtrain.tensorflow.devices.assign_gpus``).
    """
    shown = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if len(shown) > 1:
        return shown[local_rank] if len(shown) >= local_size else ""
    return shown[0]


def gpus_of(gpus: Sequence[Gpu], pids: Collection[int], own: str) -> GpuUsage | None:
    """Return the GPU usage of processes ``pids``; None where there is none, or it can't be told.

    Within a container the driver may call processes by other numbers than they have there. Then
    what all take of the GPU counts that is the rank's ``own``; by its number, unless GPUs of
    several kinds are in the host, which CUDA counts in another order than the driver.
    """
    mine = [gpu for gpu in gpus if not gpu.processes.keys().isdisjoint(pids)]
    if mine:
        taken = sum(gpu.processes.get(pid, 0) for gpu in mine for pid in pids)
    else:
        # An id may be cut short.
        mine = [gpu for gpu in gpus if own and (own == str(gpu.number) or _begins(gpu.uuid, own))]
        taken = sum(gpu.used_bytes for gpu in mine)
    if not mine:
        return None
    busy = [gpu.busy for gpu in mine if gpu.busy is not None]
    return GpuUsage(gpu=round(sum(busy) / len(busy), 1) if busy else None, gpu_bytes=taken)


def _begins(uuid: str, own: str) -> bool:
    return own.startswith("GPU-") and uuid.startswith(own)


class GpuWatch:
    """Asks the driver of this host's GPUs, if there is one, and waits no longer than a moment.

    Args:
        own: What ``own_gpu`` returned for the rank.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._found: GpuUsage | None = None
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._absent = False

    def look(self, pids: Collection[int]) -> GpuUsage | None:
        """Return the GPU usage of these processes now; None where it can't be told, or not soon."""
        if self._absent or (self._thread is not None and self._thread.is_alive()):
            return None
        self._found = None
        # What is only shown must not hold up the agent, which may be told to end its rank.
        self._thread = threading.Thread(target=self._ask, args=(pids,), name="nvml", daemon=True)
        self._thread.start()
        self._thread.join(PATIENCE_S)
        return self._found

    def _ask(self, pids: Collection[int]) -> None:
        try:
            # Only here: hosts without GPUs need not have it.
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
    """The GPUs that the driver tells of.

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
