"""Hangs of a job: who is late or missing; ranks that others can do without are killed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from hvdtrain.agent.rank_report import RankReport
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.console import Console
from hvdtrain.launch.progress import SERVING, TRAINING, JobProgress
from hvdtrain.text import format_list

__all__ = ["HangWatch", "describe_hang", "hangs", "missing", "stuck"]

logger = logging.getLogger(__package__)

# Agents answer and ranks print their stacks.
LOOK_S = 2.0
# Tracing, XLA and the first reading of the data belong to the first step.
FIRST_STEP_FACTOR = 4
_MOST_OPERATIONS = 3


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


def hangs(reports: JobProgress, running: Sequence[int], now: float, timeout_s: float) -> bool:
    """Whether the ranks should have done a step by now; who reports nothing is not judged.

    A step may take ``timeout_s``, and the first four times as long; 0 is no limit.
    """
    latest = [reports.latest[rank] for rank in running if rank in reports.latest]
    states = [state for state in latest if state.phase != SERVING]
    if timeout_s <= 0 or reports.moved_at is None or not states:
        return False
    # While one writes a checkpoint the others wait for it in the next step; who waits itself is
    # not what they wait for, as after the end of its own training.
    if any(state.phase != TRAINING and not state.waiting_in for state in states):
        return False
    if all(state.phase != TRAINING for state in states):
        return False
    factor = 1 if reports.stepped else FIRST_STEP_FACTOR
    return now - reports.moved_at > timeout_s * factor


def stuck(
    reports: JobProgress, running: Sequence[int], now: float, timeout_s: float
) -> dict[int, float]:
    """Find ranks that are late with a step while others go on or wait, and for how many seconds."""
    latest = {rank: reports.latest[rank] for rank in running if rank in reports.latest}
    states = {rank: state for rank, state in latest.items() if state.phase != SERVING}
    late = {}
    for rank, state in states.items():
        quiet_s = now - reports.moved[rank]
        stepped = (state.step or 0) > (state.resumed or 0)
        limit_s = timeout_s * (1 if stepped else FIRST_STEP_FACTOR)
        if state.phase == TRAINING and not state.waiting_in and quiet_s > limit_s > 0:
            late[rank] = quiet_s
    return late if len(late) < len(states) else {}


def missing(
    reports: JobProgress, running: Sequence[int], stopped: Mapping[int, bool]
) -> dict[int, str]:
    """Find the ranks that the others wait for in a job that hangs, and tell why."""
    latest = {rank: reports.latest.get(rank, RankReport()) for rank in running}
    absent = {r: "it waits for no other rank" for r, s in latest.items() if not s.waiting_in}
    silent = {rank: "its agent does not answer" for rank in running if rank not in stopped}
    halted = {rank: "it is stopped (state T)" for rank in running if stopped.get(rank)}
    return {**(absent if len(absent) < len(latest) else {}), **silent, **halted}


def describe_hang(
    reports: JobProgress, hosts: Mapping[int, str], stopped: Mapping[int, bool], quiet_s: float
) -> str:
    """Describe a hang in which no rank has done a step for ``quiet_s``.

    It names who is missing, and where the others wait; ``hosts`` has the ranks that run.
    """
    step = "" if reports.step is None else f" after step {reports.step}"
    lines = [f"the job hangs: no rank has done a step for {quiet_s:.0f} s{step}"]
    # Agents connect in any order.
    ranks_here = sorted(hosts)
    latest = {rank: reports.latest.get(rank, RankReport()) for rank in ranks_here}
    waiting = {rank: state.waiting_in for rank, state in latest.items() if state.waiting_in}
    absent = missing(reports, ranks_here, stopped)
    lines += [f"missing: rank {rank} on {hosts[rank]}: {why}" for rank, why in absent.items()]
    operations: dict[str, list[int]] = {}
    for rank, operation in waiting.items():
        if rank not in absent:
            operations.setdefault(operation, []).append(rank)
    for operation, ranks in list(operations.items())[:_MOST_OPERATIONS]:
        lines.append(f"rank {format_list(ranks)} waits in {operation}{_next_step(latest, ranks)}")
    if len(operations) > _MOST_OPERATIONS:
        lines.append(f"... and in {len(operations) - _MOST_OPERATIONS} other operations")
    if not waiting and not absent:
        lines.append("no rank waits for another: look at the stacks for what they do instead")
    if not absent and len(operations) > 1:
        lines.append("the ranks are in different operations: the program differs between them")
    return "\n".join(lines)


def _next_step(latest: Mapping[int, RankReport], ranks: Sequence[int]) -> str:
    done = {latest[rank].step for rank in ranks}
    step = next(iter(done))
    return f" of step {step + 1}" if len(done) == 1 and step is not None else ""
