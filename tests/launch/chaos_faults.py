"""Carries out the faults of a plan."""

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
# For ranks to start again, also on a machine that is busy with other things.
START_TIMEOUT_S = 240.0


class Chaos:
    """What happens to a job.

    Args:
        cluster: Where it runs.
        job: That is to suffer.
        disk: Where its checkpoints lie.
    """

    def __init__(self, cluster: Cluster, job: ChaosJob, disk: Disk) -> None:
        self.done: list[tuple[float, Fault]] = []
        self._cluster = cluster
        self._job = job
        self._disk = disk
        self._began_s = 0.0
        # What is to be put back, when, and how.
        self._broken: dict[str, tuple[float, Callable[[], None]]] = {}

    def carry_out(self, plan: Sequence[Fault]) -> None:
        """All of ``plan``; returns when all is put back.

        Raises:
            AssertionError: The job has ended meanwhile, or does not come back.
        """
        self._wait("its first step", self._job.trains)
        self._began_s = time.monotonic()
        before: set[int] = set()
        for fault in plan:
            self._wait_for_its_time(fault, before)
            before = self._job.ranks(*self._cluster.hosts)
            self.done.append((self._now_s, fault))
            self._do(fault)
        while self._broken:
            self._tick()

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _wait_for_its_time(self, fault: Fault, before: set[int]) -> None:
        if fault.early:
            # Those of the attempt before are about to end.
            self._wait(
                f"a rank on {fault.host}", lambda: bool(self._job.ranks(fault.host) - before)
            )
            self._rest(fault.calm_s)
            return
        self._rest(fault.at_s - self._now_s)
        self._wait("steps again", self._job.trains)
        self._rest(fault.calm_s)

    def _do(self, fault: Fault) -> None:
        host = fault.host
        if fault.kind == "full disk":
            self._disk.fill(fault.room_bytes)
            self._put_back("disk", fault.lasts_s, self._disk.free)
        elif fault.kind == "cut":
            self._cluster.cut(host)
            self._put_back(host, fault.lasts_s, lambda: self._cluster.restore(host))
        elif fault.kind == "interruption":
            self._cluster.cut(host)
            self._rest(fault.lasts_s)
            self._cluster.restore(host)
        else:
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            for pid in self._job.ranks(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _put_back(self, name: str, after_s: float, how: Callable[[], None]) -> None:
        self._broken[name] = (time.monotonic() + after_s, how)

    def _rest(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            self._tick()

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            assert time.monotonic() < deadline, (
                f"the job has not {what} after {START_TIMEOUT_S:g} s:\n{self._job.errors()}"
            )
            self._tick()

    def _tick(self) -> None:
        """Let a moment pass; what is due is put back."""
        assert self._job.running, f"the job has ended:\n{self._job.errors()}"
        time.sleep(POLL_S)
        for name, (due, put_back) in list(self._broken.items()):
            if time.monotonic() >= due:
                put_back()
                del self._broken[name]
