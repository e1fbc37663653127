"""Starts a job, watches it and sees it to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from hvdtrain.agent.process_tree import kill_descendants, shell_code
from hvdtrain.errors import LaunchError
from hvdtrain.exit_codes import PREEMPTING
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.commands import Command
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import JobRecord, Outcome, RankExit, classify, describe_loss, preempted
from hvdtrain.launch.hang import HangWatch
from hvdtrain.launch.hosts import HostWatch
from hvdtrain.launch.observer import Observer, RankLost
from hvdtrain.launch.progress import ProgressRecord

__all__ = ["Supervisor", "TimeLimits"]

logger = logging.getLogger(__package__)

STEP_S = 0.05
PAUSE_PER_RANK_S = 2e-5
# No look at the ranks takes so long.
SUSPENDED_S = 2.0
# After a rank has failed the others, which learn of it from each other, may end by themselves.
SETTLE_S = 0.5
# mpirun and srun tidy up after the last rank.
STARTER_TIMEOUT_S = 5.0
# mpirun says 16 lines about each host that it can't reach, after ssh's one line on all of them.
KEPT_LINES = 40_000


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Limits on how long starting, ending and a step may take.

    Attributes:
        start_s: Until all agents have reported.
        grace_s: From asking ranks to end to killing them.
        preempt_grace_s: The same where they are to save what they have before.
        hang_s: For one step, in programs that report their steps; 0 for no limit.
    """

    start_s: float = 120.0
    grace_s: float = 5.0
    preempt_grace_s: float = 60.0
    hang_s: float = 0.0


class Supervisor:
    """One job from its start to its end; call ``run`` once, from the main thread.

    Args:
        command: The command of mpirun or srun that starts an agent for each rank.
        hosts: The host of each rank, as planned.
        received: Signals as they arrive, noted by somebody else.
        observer: Receives the events; None for nobody.
        host_watch: Tells when ranks are to leave their hosts; None for never.
        min_np: Ranks that go on without those that are lost, at least; None for all.
        critical: Roles of the ranks without which the others don't go on.
    """

    def __init__(
        self,
        command: Command,
        server: AgentServer,
        console: Console,
        *,
        hosts: Mapping[int, str],
        time_limits: TimeLimits,
        received: Sequence[int],
        observer: Observer | None = None,
        host_watch: HostWatch | None = None,
        min_np: int | None = None,
        critical: Mapping[int, str] | None = None,
    ) -> None:
        self._command = command
        self._server = server
        self._console = console
        self._time_limits = time_limits
        self._host_watch = host_watch
        self._min_np = min_np
        self._record = JobRecord(
            hosts=hosts,
            ends=server.ends,
            reports=server.reports,
            critical=critical or {},
            received=received,
            starter=command.argv[0],
            words=deque(maxlen=KEPT_LINES),
            start_timeout_s=time_limits.start_s,
            started_at=time.monotonic(),
        )
        self._observer = observer or Observer()
        self._progress = ProgressRecord(
            self._observer,
            server.reports,
            server.ranks,
            hosts=server.hosts,
            running=lambda: server.running,
        )
        self._rest = b""
        self._acted_on = 0
        self._stop_at: float | None = None
        self._give_up_at: float | None = None
        self._too_few = False
        self._handled: set[int] = set()
        self._hang_watch = HangWatch(
            server,
            console,
            timeout_s=time_limits.hang_s,
            critical=self._record.critical,
            goes_on=lambda: self._elastic,
        )

    def run(self) -> Outcome:
        """Run the job and see it to its end.

        Raises:
            LaunchError: mpirun or srun can't be started.
        """
        starter = self._start()
        try:
            self._watch(starter)
        finally:
            # What arrives from now on has not ended the job.
            self._record.received = self._record.received[: self._acted_on]
            self._record.ended_at = time.monotonic()
            self._end(starter)
            self._progress.review(time.monotonic(), last=True)
        self._record.seen = self._server.hosts()
        # The starter has its own opinion of a job that goes on without one of its ranks.
        if not self._server.dropped:
            self._record.starter_code = shell_code(starter.returncode)
        return classify(self._record)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            starter = subprocess.Popen(
                self._command.argv,
                env=self._command.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"{self._command.argv[0]} can't be started: {error.strerror}. Install the MPI "
                "again, or load another one."
            ) from None
        assert starter.stdout is not None
        os.set_blocking(starter.stdout.fileno(), False)
        self._server.selector.register(starter.stdout, selectors.EVENT_READ, self._read_starter)
        return starter

    def _read_starter(self, pipe: IO[bytes]) -> None:
        """Read what mpirun or srun says; show it unless it only comments on a failed rank."""
        data = os.read(pipe.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines.append(self._rest)
        for line in (line.decode(errors="replace").rstrip("\r") for line in lines):
            self._record.words.append(line)
            if line.strip() and self._server.connected and not self._failed:
                logger.warning(f"{self._record.starter_name}: {line}")
        if not data:
            self._server.selector.unregister(pipe)

    @property
    def _failed(self) -> bool:
        return any(end.code != 0 for end in self._server.ends)

    def _watch(self, starter: subprocess.Popen[bytes]) -> None:
        # Each look at all ranks takes longer the more there are, and something comes all the time.
        pause_s, due_at = PAUSE_PER_RANK_S * self._server.ranks, 0.0
        now = time.monotonic()
        while True:
            before = now
            self._server.step(STEP_S)
            now = time.monotonic()
            if now - before > SUSPENDED_S:
                self._make_up_for(now - before, now)
            if now < due_at:
                continue
            due_at = now + pause_s
            self._act_on_signals(now)
            self._act_on_ends(now)
            self._progress.review(now)
            if self._stop_at is None and (hang := self._hang_watch.review(now)):
                self._record.hang = hang
                logger.error(hang)
                self._stop(signal.SIGTERM, self._time_limits.grace_s, now)
            self._leave_if_told(now)
            started = self._server.connected == self._server.ranks
            if not started and now - self._record.started_at > self._time_limits.start_s:
                self._record.late = True
            gone = starter.poll() is not None
            if (gone or self._record.late) and self._stop_at is None:
                self._stop_at = now
            if self._stop_at is not None and now >= self._stop_at and self._give_up_at is None:
                self._stop(signal.SIGTERM, self._time_limits.grace_s, now)
            if not self._server.running:
                if self._failed or started or gone or self._record.late:
                    return
            elif self._give_up_at is not None and now > self._give_up_at:
                return
            if not self._failed:
                self._server.dismiss()

    def _make_up_for(self, seconds: float, now: float) -> None:
        """Move all deadlines: this process was stopped (Ctrl-Z) and could not see the ranks."""
        self._record.started_at += seconds
        self._stop_at = self._stop_at and self._stop_at + seconds
        self._give_up_at = self._give_up_at and self._give_up_at + seconds
        self._server.reports.make_up_for(seconds, now)

    def _leave_if_told(self, now: float) -> None:
        """Have ranks save and end where hosts go, or where more have come."""
        if self._host_watch is None or self._stop_at is not None:
            return
        if why := self._host_watch.why_leave(now, self._server.reports.saved_at):
            logger.warning(why)
            self._stop(signal.SIGUSR1, self._time_limits.preempt_grace_s, now)

    def _stop(self, number: int, grace_s: float, now: float) -> None:
        """Have all ranks end, in ``grace_s`` at the latest."""
        self._server.stop(number, grace_s)
        give_up_at = now + grace_s + STARTER_TIMEOUT_S
        self._stop_at = self._stop_at or now
        self._give_up_at = min(self._give_up_at or give_up_at, give_up_at)

    def _act_on_signals(self, now: float) -> None:
        received = self._record.received
        for number in received[self._acted_on :]:
            self._acted_on += 1
            if received.count(signal.SIGINT) > 1:
                self._stop(signal.SIGKILL, 0.0, now)
            elif number in PREEMPTING:
                self._stop(number, self._time_limits.preempt_grace_s, now)
            else:
                self._stop(number, self._time_limits.grace_s, now)

    def _act_on_ends(self, now: float) -> None:
        """Decide how long the other ranks may go on after one has ended."""
        left_early: bool | None = None
        for end in [end for end in self._server.ends if end.rank not in self._handled]:
            self._handled.add(end.rank)
            others_s = SETTLE_S
            survivable = self._elastic and end.is_loss and end.rank not in self._record.critical
            if survivable and self._stop_at is None:
                if self._note_loss(end):
                    continue
                self._too_few = True
            if left_early is None:
                left_early = preempted(self._server.ends)
            if self._too_few or left_early:
                # They learn of it, and save what they have; some sooner than others.
                others_s = self._time_limits.preempt_grace_s
            if end.code != 0:
                self._stop_at = min(self._stop_at or now + others_s, now + others_s)

    @property
    def _elastic(self) -> bool:
        """Whether ranks continue without a lost one: not before all have started MPI."""
        if self._min_np is None:
            return False
        there = set(range(self._server.ranks)).difference(self._server.dropped)
        return there <= self._server.reports.started

    def _note_loss(self, end: RankExit) -> bool:
        """Tell of a rank that died, and whether the others go on."""
        assert self._min_np is not None
        left = self._server.ranks - len(self._server.dropped) - 1
        enough = left >= self._min_np
        report = self._server.reports.latest.get(end.rank)
        step = report.step if report is not None else None
        words = describe_loss(end, step, left, enough=enough)
        logger.warning(words)
        self._observer.on_event(RankLost(rank=end.rank, host=end.host, step=step, words=words))
        if enough:
            self._server.drop_lost(end)
            self._console.leave_behind(end.rank)
        return enough

    def _end(self, starter: subprocess.Popen[bytes]) -> None:
        """Let agents and starter go; kill what doesn't."""
        self._server.dismiss()
        deadline = time.monotonic() + STARTER_TIMEOUT_S
        if self._record.late or self._server.running or self._server.connected < self._server.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGTERM)
        while starter.poll() is None and time.monotonic() < deadline:
            self._server.step(STEP_S)
        kill_descendants(starter.pid)
        if starter.poll() is None:
            starter.kill()
        starter.wait(timeout=STARTER_TIMEOUT_S)
        self._server.step(0.0)
        self._server.settle()
        assert starter.stdout is not None
        with contextlib.suppress(KeyError):
            self._server.selector.unregister(starter.stdout)
        starter.stdout.close()
