"""Resource usage of a rank's program: memory, processor time and GPUs of its processes.

In passing it is seen whether one of them is stopped.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any

from hvdtrain.agent.gpu_usage import GpuWatch
from hvdtrain.agent.process_tree import is_stopped

__all__ = ["Usage", "UsageWatch", "read_usage"]

INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resource usage of the processes of a rank.

    Attributes:
        rss_bytes: Memory that is theirs, summed; what several of them share counts for each.
        cpu: Cores that they kept busy since the last time, such as 1.5.
        gpu: For how much of the last moment their GPUs computed, in percent; None for unknown.
        gpu_bytes: Memory that they take of GPUs; None for unknown.
        stopped: Whether one of them is, as by SIGSTOP or a debugger, so that it does nothing.
    """

    rss_bytes: int
    cpu: float
    gpu: float | None = None
    gpu_bytes: int | None = None
    stopped: bool = False


def read_usage(message: dict[str, Any]) -> Usage | None:
    """Return the usage in a message; None where it holds something else."""
    rss, cpu = message.get("rss_bytes"), message.get("cpu")
    if type(rss) is not int or not isinstance(cpu, (int, float)):
        return None
    gpu, gpu_bytes = message.get("gpu"), message.get("gpu_bytes")
    return Usage(
        rss_bytes=rss,
        cpu=float(cpu),
        gpu=float(gpu) if isinstance(gpu, (int, float)) else None,
        gpu_bytes=gpu_bytes if type(gpu_bytes) is int else None,
        stopped=message.get("stopped") is True,
    )


class UsageWatch:
    """Looks at a program and its children now and then.

    Args:
        gpus: Asked for what these take of GPUs.
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
        taken = self._gpus.look(busy_s.keys())
        return Usage(
            rss_bytes=rss,
            cpu=round(spent_s / since_s, 3),
            gpu=taken.gpu if taken is not None else None,
            gpu_bytes=taken.gpu_bytes if taken is not None else None,
            stopped=stopped,
        )
