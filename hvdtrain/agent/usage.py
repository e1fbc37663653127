"""Measures the resources that a rank's processes use: memory, CPU time, and GPUs (with NVML)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Sequence

from hvdtrain.agent.process_tree import is_stopped
from hvdtrain.agent.rank_report import Usage
from hvdtrain.cluster.gpus import GpuReader, GpuState
from hvdtrain.errors import LaunchError

__all__ = ["UNKNOWN", "GpuUsage", "GpuWatch", "UsageWatch", "gpu_usage"]

INTERVAL_S = 5.0
PATIENCE_S = 0.2

# Utilization of a rank's GPUs in percent, and its GPU memory in bytes, if known.
GpuUsage = tuple[float | None, int | None]
UNKNOWN: GpuUsage = (None, None)


class UsageWatch:
    """Measures a program and its children periodically."""

    def __init__(self, gpus: GpuWatch) -> None:
        self._gpus = gpus
        self._due_s = time.monotonic() + INTERVAL_S
        self._cpu_s: dict[int, float] = {}
        self._measured_s = time.monotonic()

    def look(self, pid: int) -> Usage | None:
        """Return the usage of a process and its children; None if recent, or without psutil."""
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


def gpu_usage(gpus: Sequence[GpuState], pids: Collection[int], own: str) -> GpuUsage:
    """Return how much the processes ``pids`` use the GPUs.

    In a container, the driver may know the processes by different IDs. The result is then the usage
    by all processes of the GPU with the ID ``own``.
    """
    used = [
        (gpu, size) for gpu in gpus for process, _, size in gpu.processes if process in pids
    ] or [(gpu, gpu.used_bytes) for gpu in gpus if own and gpu.id == own]
    if not used:
        return UNKNOWN
    busy = {gpu.id: gpu.busy for gpu, _ in used if gpu.busy is not None}
    mean = round(sum(busy.values()) / len(busy), 1) if busy else None
    return mean, sum(size for _, size in used)


class GpuWatch:
    """Measures the use of a rank's GPUs."""

    def __init__(self) -> None:
        self.own = ""  # ID of the rank's first GPU; empty until the rank has reported it
        self._reader = GpuReader(faults=False)

    def look(self, pids: Collection[int]) -> GpuUsage:
        """Return how much the processes use GPUs, or ``UNKNOWN`` if the driver is slow or fails."""
        try:
            # The agent must stay responsive to requests to stop its rank.
            return gpu_usage(self._reader.read(PATIENCE_S), pids, self.own)
        except LaunchError:
            return UNKNOWN
