"""The injection of a plan's faults into a job."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from tests.launch.chaos_job import ChaosJob
from tests.launch.chaos_plan import Fault
from tests.testbed.cluster import Cluster
from tests.testbed.faults import Disk

__all__ = ["Chaos"]

POLL_S = 0.1
# Time limit in seconds for ranks to restart on a busy machine.
START_TIMEOUT_S = 240.0


class Chaos:
    """Injects faults into a job, whose checkpoints are on ``disk``."""

    def __init__(self, cluster: Cluster, job: ChaosJob, disk: Disk) -> None:
        self.done: list[tuple[float, Fault]] = []
        self._cluster = cluster
        self._job = job
        self._disk = disk
        self._started_s = 0.0
        # Name: (time of repair, repair).
        self._broken: dict[str, tuple[float, Callable[[], None]]] = {}

    def carry_out(self, plan: Sequence[Fault]) -> None:
        """Inject all faults of ``plan``, and return when all are repaired."""
        self._wait("its first step", self._job.trains)
        self._started_s = time.monotonic()
        before: set[int] = set()
        for fault in plan:
            self._await(fault, before)
            before = self._job.ranks(*self._cluster.hosts)
            self.done.append((self._now_s, fault))
            self._inject(fault)
        while self._broken:
            self._tick()

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    def _await(self, fault: Fault, before: set[int]) -> None:
        if fault.early:
            # Ranks of the previous attempt are about to end.
            self._wait(
                f"a rank on {fault.host}", lambda: bool(self._job.ranks(fault.host) - before)
            )
            self._rest(fault.calm_s)
            return
        self._rest(fault.at_s - self._now_s)
        self._wait("steps again", self._job.trains)
        self._rest(fault.calm_s)

    def _inject(self, fault: Fault) -> None:
        host = fault.host
        if fault.kind == "full disk":
            self._disk.fill(fault.room_bytes)
            self._repair_later("disk", fault.lasts_s, self._disk.free)
        elif fault.kind == "cut":
            self._cluster.cut(host)
            self._repair_later(host, fault.lasts_s, lambda: self._cluster.restore(host))
        elif fault.kind == "interruption":
            self._cluster.cut(host)
            self._rest(fault.lasts_s)
            self._cluster.restore(host)
        else:
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            for pid in self._job.ranks(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _repair_later(self, name: str, after_s: float, repair: Callable[[], None]) -> None:
        self._broken[name] = (time.monotonic() + after_s, repair)

    def _rest(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            self._tick()

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            assert time.monotonic() < deadline, (
                f"no {what} after {START_TIMEOUT_S:g} s:\n{self._job.errors()}"
            )
            self._tick()

    def _tick(self) -> None:
        """Wait a moment, and make the repairs that are due."""
        assert self._job.running, f"the job has ended:\n{self._job.errors()}"
        time.sleep(POLL_S)
        for name, (due, repair) in list(self._broken.items()):
            if time.monotonic() >= due:
                repair()
                del self._broken[name]
