"""Detects hangs, and kills hanging ranks if the other ranks can continue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from hvdtrain.agent.rank_report import RankReport
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import list_ranks
from hvdtrain.launch.progress import SERVING, TRAINING, JobProgress

__all__ = ["HangWatch", "describe_hang", "is_hanging", "missing_ranks", "stuck_ranks"]

logger = logging.getLogger(__package__)

# Time for agents to answer, and for ranks to print their stacks.
PROBE_S = 2.0
# The first step includes tracing, XLA compilation and the first reading of the data.
FIRST_STEP_FACTOR = 4
_SHOWN_OPERATIONS = 3


class HangWatch:
    """Acts on ranks that complete no steps. Call ``review`` often while the job runs.

    Args:
        timeout_s: Time limit of a step in seconds. 0 means no limit.
        critical: Roles of the ranks without which the other ranks can't continue.
        can_lose_ranks: Function that returns whether the other ranks would continue if a rank were
            lost now.
    """

    def __init__(
        self,
        server: AgentServer,
        console: Console,
        *,
        timeout_s: float,
        critical: Mapping[int, str],
        can_lose_ranks: Callable[[], bool],
    ) -> None:
        self._server = server
        self._console = console
        self._timeout_s = timeout_s
        self._critical = critical
        self._can_lose_ranks = can_lose_ranks
        self._probed_at: float | None = None
        self._killed: set[int] = set()

    def review(self, now: float) -> str:
        """Act on ranks that hang, and return why the job must end, or "" if it continues."""
        reports, running = self._server.reports, self._server.running
        # Without parameter servers no ranks are killed, because all ranks wait for one that hangs.
        can_kill = bool(self._critical) and self._can_lose_ranks()
        if can_kill:
            late = stuck_ranks(reports, running, now, self._timeout_s)
            for rank in late.keys() - self._critical.keys():
                self._kill(rank, f"has completed no step for {late[rank]:.0f} s")
        if not is_hanging(reports, running, now, self._timeout_s):
            self._probed_at = None
        elif self._probed_at is None:
            self._probed_at = now
            self._console.show_all()
            self._server.probe()
        elif now - self._probed_at > PROBE_S and not (can_kill and self._kill_missing()):
            hosts = {rank: host for rank, host in self._server.hosts().items() if rank in running}
            quiet_s = now - (reports.moved_at or now)
            return describe_hang(reports, hosts, self._server.stopped, quiet_s)
        return ""

    def _kill_missing(self) -> bool:
        """Kill ranks that all others wait for, unless one is critical. Return whether any were."""
        missing = missing_ranks(self._server.reports, self._server.running, self._server.stopped)
        if missing.keys() & (self._critical.keys() | self._killed):
            return False
        for rank, reason in missing.items():
            self._kill(rank, f"keeps the others waiting ({reason})")
        self._probed_at = None
        return bool(missing)

    def _kill(self, rank: int, reason: str) -> None:
        if rank not in self._killed:
            self._killed.add(rank)
            logger.warning(f"rank {rank} on {self._server.hosts()[rank]} {reason}; killing it")
            self._server.kill(rank)


def is_hanging(reports: JobProgress, running: Sequence[int], now: float, timeout_s: float) -> bool:
    """Return whether the reporting ranks should have completed a step by now.

    A step may take ``timeout_s`` seconds, and the first step may take four times as long. If
    ``timeout_s`` is 0, steps may take any time.
    """
    latest = [reports.latest[rank] for rank in running if rank in reports.latest]
    states = [state for state in latest if state.phase != SERVING]
    if timeout_s <= 0 or reports.moved_at is None:
        return False
    # If a rank writes a checkpoint or validates, the others may wait for it, and nothing hangs.
    # This does not hold for a rank that itself waits, for instance after the end of its training.
    if any(state.phase != TRAINING and not state.waiting_in for state in states):
        return False
    if all(state.phase != TRAINING for state in states):
        return False
    factor = 1 if reports.has_stepped else FIRST_STEP_FACTOR
    return now - reports.moved_at > timeout_s * factor


def stuck_ranks(
    reports: JobProgress, running: Sequence[int], now: float, timeout_s: float
) -> dict[int, float]:
    """Return the ranks whose step takes too long, each with the seconds since its last progress.

    The result is empty if the steps of all ranks take too long.
    """
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


def missing_ranks(
    reports: JobProgress, running: Sequence[int], stopped: Mapping[int, bool]
) -> dict[int, str]:
    """Return the ranks that the other ranks wait for in a hanging job, each with the reason."""
    latest = {rank: reports.latest.get(rank, RankReport()) for rank in running}
    busy = {r: "not waiting for other ranks" for r, s in latest.items() if not s.waiting_in}
    silent = {rank: "its agent does not answer" for rank in running if rank not in stopped}
    halted = {rank: "stopped (state T)" for rank in running if stopped.get(rank)}
    return {**(busy if len(busy) < len(latest) else {}), **silent, **halted}


def describe_hang(
    reports: JobProgress, hosts: Mapping[int, str], stopped: Mapping[int, bool], quiet_s: float
) -> str:
    """Describe a hang: which ranks have not arrived, and in which operations other ranks wait.

    ``quiet_s`` is the number of seconds since a rank last made progress.
    """
    step = "" if reports.step is None else f" after step {reports.step}"
    lines = [f"the job hangs: no rank has completed a step for {quiet_s:.0f} s{step}"]
    # Sorted because agents connect in any order.
    ranks = sorted(hosts)
    latest = {rank: reports.latest.get(rank, RankReport()) for rank in ranks}
    missing = missing_ranks(reports, ranks, stopped)
    lines += [
        f"rank {rank} on {hosts[rank]} has not arrived: {why}" for rank, why in missing.items()
    ]
    operations: dict[str, list[int]] = {}
    for rank, state in latest.items():
        if state.waiting_in and rank not in missing:
            operations.setdefault(state.waiting_in, []).append(rank)
    for operation, waiting in list(operations.items())[:_SHOWN_OPERATIONS]:
        verb = "wait" if len(waiting) > 1 else "waits"
        done, *others = {latest[rank].step for rank in waiting}
        step = "" if done is None or others else f"step {done + 1}: "
        lines.append(f"{list_ranks(waiting)} {verb} in {step}{operation}")
    if len(operations) > _SHOWN_OPERATIONS:
        lines.append(f"... and in {len(operations) - _SHOWN_OPERATIONS} other operations")
    if not missing and not operations:
        lines.append("no rank waits for another; see the stack traces above")
    if not missing and len(operations) > 1:
        lines.append("ranks wait in different operations, so they run different code")
    return "\n".join(lines)
