"""Watches a job for hangs: kills ranks that the others can do without, or tells who hangs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.console import Console
from hvdtrain.launch.job_progress import describe_hang, hangs, missing, stuck

__all__ = ["HangWatch"]

logger = logging.getLogger(__package__)

# Agents answer and ranks print their stacks.
LOOK_S = 2.0


class HangWatch:
    """A watch that acts on ranks that make no steps; call ``review`` often while the job runs.

    Args:
        timeout_s: How long a step may take; 0 for no limit.
        critical: Roles of the ranks without which the others don't go on.
        goes_on: Whether the ranks would go on without one now.
    """

    def __init__(
        self,
        server: AgentServer,
        console: Console,
        *,
        timeout_s: float,
        critical: Mapping[int, str],
        goes_on: Callable[[], bool],
    ) -> None:
        self._server = server
        self._console = console
        self._timeout_s = timeout_s
        self._critical = critical
        self._goes_on = goes_on
        self._looking_since: float | None = None
        self._killed: set[int] = set()

    def review(self, now: float) -> str:
        """Act on ranks that hang; return who hangs if the job has to end for that, else empty."""
        reports, running = self._server.reports, self._server.running
        # Without servers all ranks are in step, and wait for the one that hangs.
        can_do_without = bool(self._critical) and self._goes_on()
        if can_do_without:
            late = stuck(reports, running, now, self._timeout_s)
            for rank in late.keys() - self._critical.keys():
                self._kill(rank, f"has done no step for {late[rank]:.0f} s, while others go on")
        if not hangs(reports, running, now, self._timeout_s):
            self._looking_since = None
        elif self._looking_since is None:
            self._looking_since = now
            self._console.show_all()
            self._server.look()
        elif now - self._looking_since > LOOK_S and not (can_do_without and self._kill_missing()):
            hosts = {rank: host for rank, host in self._server.hosts().items() if rank in running}
            quiet_s = now - (reports.moved_at or now)
            return describe_hang(reports, hosts, self._server.stopped, quiet_s)
        return ""

    def _kill_missing(self) -> bool:
        """Kill those that all others wait for, if none is critical; return whether that was so."""
        absent = missing(self._server.reports, self._server.running, self._server.stopped)
        if absent.keys() & (self._critical.keys() | self._killed):
            return False
        for rank, why in absent.items():
            self._kill(rank, f"keeps the others waiting ({why})")
        self._looking_since = None
        return bool(absent)

    def _kill(self, rank: int, why: str) -> None:
        if rank not in self._killed:
            self._killed.add(rank)
            logger.warning(f"rank {rank} on {self._server.hosts()[rank]} {why}: it is killed")
            self._server.kill(rank)
