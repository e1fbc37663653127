"""Resource usage of a rank's program: memory, processor time and GPUs of its processes.

In passing it is seen whether one of them is stopped.
"""

from __future__ import annotations

import contextlib
import math
import time

from hvdtrain.agent.gpu_usage import GpuWatch
from hvdtrain.agent.process_tree import is_stopped
from hvdtrain.agent.rank_report import Usage

__all__ = ["UsageWatch"]

INTERVAL_S = 5.0


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
