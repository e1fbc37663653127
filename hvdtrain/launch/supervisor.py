"""Runs one attempt at a job: starts mpirun or srun, watches the ranks, and ends all processes."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from hvdtrain.agent.process_tree import kill_descendants, shell_code
from hvdtrain.errors import LaunchError
from hvdtrain.exit_codes import ENDING, PREEMPTING
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.commands import Command
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import (
    JobRecord,
    Outcome,
    RankExit,
    classify,
    describe_loss,
    is_preempted,
)
from hvdtrain.launch.hang import HangWatch
from hvdtrain.launch.hosts import HostWatch
from hvdtrain.launch.observer import Observer, RankLost
from hvdtrain.launch.progress import ProgressPublisher

__all__ = ["Supervisor", "TimeLimits", "caught_signals", "ignore_signals", "pause"]

logger = logging.getLogger(__package__)

STEP_S = 0.05
PAUSE_PER_RANK_S = 2e-5
# No iteration of the loop takes this long unless this process was suspended.
SUSPENDED_S = 2.0
# How long the other ranks may continue after a failure. They detect it, and may exit on their own.
# A killed rank needs no such time, because no other rank can have caused its end.
SETTLE_S = 0.5
# How long mpirun or srun may take to clean up after the last rank.
STARTER_TIMEOUT_S = 5.0
# For each host that mpirun can't reach, ssh prints one line, and mpirun 16 lines.
KEPT_LINES = 40_000


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Time limits of a job, in seconds."""

    start_s: float = 120.0  # until all agents have connected
    grace_s: float = 5.0  # from SIGTERM to SIGKILL
    preempt_grace_s: float = 60.0  # from SIGUSR1 or SIGUSR2 to SIGKILL
    hang_s: float = 0.0  # for a step, in programs that report their steps; 0 for no limit


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Catch the signals that stop a job in the block, and yield the list of caught signals."""
    received: list[int] = []
    # Signals that are ignored at the start (nohup) stay ignored.
    caught = [
        number for number in (*ENDING, *PREEMPTING) if signal.getsignal(number) != signal.SIG_IGN
    ]
    previous = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in caught
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore the signals that stop a job, in a process whose job has ended."""
    for number in (*ENDING, *PREEMPTING):
        signal.signal(number, signal.SIG_IGN)


def pause(delay_s: float, received: Sequence[int]) -> bool:
    """Sleep for ``delay_s``, or until a signal is received. Return False after a signal."""
    until = time.monotonic() + delay_s
    while not received and time.monotonic() < until:
        time.sleep(STEP_S)
    return not received


class Supervisor:
    """Runs one attempt. Call ``run`` once, from the main thread, and ``close`` at some time later.

    Args:
        command: The command of mpirun or srun that starts an agent for each rank.
        hosts: The planned host of each rank.
        received: The list of signals from ``caught_signals``.
        min_np: Minimum number of ranks with which the job continues after a loss. None if no rank
            may be lost.
        critical: Roles of the ranks without which the other ranks can't continue.
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
            starter=os.path.basename(command.argv[0]),
            starter_output=deque(maxlen=KEPT_LINES),
            started_at=time.monotonic(),
        )
        self._observer = observer or Observer()
        self._publisher = ProgressPublisher(self._observer, server.reports, server.ranks)
        self._partial_line = b""
        self._handled_signals = 0
        self._handled_ends: set[int] = set()
        self._stop_at: float | None = None
        self._give_up_at: float | None = None
        self._too_few = False
        self._reaper: threading.Thread | None = None
        self._hang_watch = HangWatch(
            server,
            console,
            timeout_s=time_limits.hang_s,
            critical=self._record.critical,
            can_lose_ranks=self._can_lose_ranks,
        )

    def run(self) -> Outcome:
        """Run the attempt to its end and return its outcome.

        After a failure, mpirun may still be cleaning up, which takes a quarter of a second.

        Raises:
            LaunchError: If mpirun or srun can't be started.
        """
        starter = self._start()
        try:
            self._watch(starter)
        finally:
            # Drop signals that were not handled yet, because the job did not end because of them.
            self._record.received = self._record.received[: self._handled_signals]
            self._record.ended_at = time.monotonic()
            self._end(starter)
            self._publish(time.monotonic(), last=True)
        self._record.seen = self._server.hosts()
        # After a loss that the job survived, mpirun exits with an error although the job succeeded.
        if not self._server.dropped and self._reaper is None:
            self._record.starter_code = shell_code(starter.returncode)
        return classify(self._record)

    def close(self) -> None:
        """Wait until mpirun or srun has exited."""
        if self._reaper is not None:
            self._reaper.join(3 * STARTER_TIMEOUT_S)

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
                f"{self._command.argv[0]} can't be started: {error.strerror}. Reinstall MPI, or "
                "load another MPI module."
            ) from None
        assert starter.stdout is not None
        os.set_blocking(starter.stdout.fileno(), False)
        self._server.selector.register(starter.stdout, selectors.EVENT_READ, self._read_starter)
        return starter

    def _read_starter(self, pipe: IO[bytes]) -> None:
        """Show the output of mpirun or srun, except after a failure, on which it only comments."""
        data = os.read(pipe.fileno(), 1 << 16)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        if not data and self._partial_line:
            lines.append(self._partial_line)
        for line in (line.decode(errors="replace").rstrip("\r") for line in lines):
            self._record.starter_output.append(line)
            if line.strip() and self._server.connected and not self._has_failed:
                logger.warning(f"{self._record.starter}: {line}")
        if not data:
            self._server.selector.unregister(pipe)

    @property
    def _has_failed(self) -> bool:
        return any(end.code != 0 for end in self._server.ends)

    def _watch(self, starter: subprocess.Popen[bytes]) -> None:
        # Messages arrive all the time. A review takes longer the more ranks there are, so there is
        # a pause between two reviews.
        pause_s, due_at = PAUSE_PER_RANK_S * self._server.ranks, 0.0
        now = time.monotonic()
        while True:
            before = now
            self._server.step(STEP_S)
            now = time.monotonic()
            if now - before > SUSPENDED_S:
                self._postpone_deadlines(now - before, now)
            if now >= due_at:
                due_at = now + pause_s
                if self._review(now, has_exited=starter.poll() is not None):
                    return

    def _review(self, now: float, *, has_exited: bool) -> bool:
        """Act on signals, ended ranks, hangs and deadlines. Return whether the attempt is over."""
        self._act_on_signals(now)
        self._act_on_ends(now)
        self._publish(now)
        if self._stop_at is None and (hang := self._hang_watch.review(now)):
            self._record.hang = hang
            logger.error(hang)
            self._stop(signal.SIGTERM, self._time_limits.grace_s, now)
        self._act_on_hosts(now)
        started = self._server.connected == self._server.ranks
        if not started and now - self._record.started_at > self._time_limits.start_s:
            self._record.start_timeout_s = self._time_limits.start_s
        is_late = self._record.start_timeout_s is not None
        if (has_exited or is_late) and self._stop_at is None:
            self._stop_at = now
        if self._stop_at is not None and now >= self._stop_at and self._give_up_at is None:
            self._stop_after_failure(now)
        if not self._server.running:
            if self._has_failed or started or has_exited or is_late:
                return True
        elif self._give_up_at is not None and now > self._give_up_at:
            return True
        if not self._has_failed:
            self._server.dismiss()
        return False

    def _publish(self, now: float, *, last: bool = False) -> None:
        self._publisher.review(now, self._server.hosts(), self._server.running, last=last)

    def _postpone_deadlines(self, seconds: float, now: float) -> None:
        """Postpone all deadlines, because this process was suspended (Ctrl-Z) for ``seconds``."""
        self._record.started_at += seconds
        self._stop_at = self._stop_at and self._stop_at + seconds
        self._give_up_at = self._give_up_at and self._give_up_at + seconds
        self._server.reports.skip(seconds, now)

    def _act_on_hosts(self, now: float) -> None:
        """Stop the ranks for a restart if managed hosts leave or join."""
        if self._host_watch is None or self._stop_at is not None:
            return
        if reason := self._host_watch.reason_to_restart(now, self._server.reports.saved_at):
            logger.warning(reason)
            self._stop(signal.SIGUSR1, self._time_limits.preempt_grace_s, now)

    def _stop(self, number: int, grace_s: float, now: float) -> None:
        """Send signal ``number`` to all ranks, and SIGKILL after ``grace_s`` seconds."""
        self._server.stop(number, grace_s)
        give_up_at = now + grace_s + STARTER_TIMEOUT_S
        self._stop_at = self._stop_at or now
        self._give_up_at = min(self._give_up_at or give_up_at, give_up_at)

    def _stop_after_failure(self, now: float) -> None:
        """Stop all ranks at once. Only checkpoints that are being written are completed."""
        grace_s, write_s = self._time_limits.grace_s, self._time_limits.preempt_grace_s
        self._server.stop(signal.SIGTERM, grace_s, write_s=write_s)
        give_up_at = now + grace_s + STARTER_TIMEOUT_S
        if self._server.reports.is_writing(self._server.running):
            give_up_at += write_s
        self._give_up_at = give_up_at

    def _act_on_signals(self, now: float) -> None:
        received = self._record.received
        for number in received[self._handled_signals :]:
            self._handled_signals += 1
            if received.count(signal.SIGINT) > 1:
                self._stop(signal.SIGKILL, 0.0, now)
            elif number in PREEMPTING:
                self._stop(number, self._time_limits.preempt_grace_s, now)
            else:
                self._stop(number, self._time_limits.grace_s, now)

    def _act_on_ends(self, now: float) -> None:
        """Decide how long the other ranks may continue after a rank has ended."""
        preempted: bool | None = None
        for end in [end for end in self._server.ends if end.rank not in self._handled_ends]:
            self._handled_ends.add(end.rank)
            is_survivable = end.is_loss and end.rank not in self._record.critical
            if self._stop_at is None and is_survivable and self._can_lose_ranks():
                if self._survive_loss(end):
                    continue
                self._too_few = True
            if preempted is None:
                preempted = is_preempted(self._server.ends)
            # The other ranks detect a loss or preemption and save a checkpoint.
            saving = self._too_few or preempted
            if saving:
                others_s = self._time_limits.preempt_grace_s
            elif end.is_loss and end.code == shell_code(-signal.SIGKILL):
                others_s = 0.0
            else:
                others_s = SETTLE_S
            if end.code != 0:
                self._stop_at = min(self._stop_at or now + others_s, now + others_s)

    def _can_lose_ranks(self) -> bool:
        """Return whether the others would continue after a loss: only once all have started MPI."""
        if self._min_np is None:
            return False
        remaining = set(range(self._server.ranks)).difference(self._server.dropped)
        return remaining <= self._server.reports.started

    def _survive_loss(self, end: RankExit) -> bool:
        """Report a lost rank, and return whether enough ranks are left to continue."""
        assert self._min_np is not None
        left = self._server.ranks - len(self._server.dropped) - 1
        report = self._server.reports.latest.get(end.rank)
        step = report.step if report is not None else None
        message = describe_loss(end, step, left, self._min_np)
        logger.warning(message)
        self._observer.on_event(RankLost(rank=end.rank, host=end.host, step=step, words=message))
        if left < self._min_np:
            return False
        self._server.drop_lost(end)
        self._console.drop_rank(end.rank)
        return True

    def _end(self, starter: subprocess.Popen[bytes]) -> None:
        """Let the agents and mpirun or srun exit, and kill the processes that remain."""
        self._server.dismiss()
        deadline = time.monotonic() + STARTER_TIMEOUT_S
        have_ended = not self._server.running and self._server.connected == self._server.ranks
        if not have_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGTERM)
        # A step of Slurm, and processes that are out of reach, must end before the next attempt.
        are_known = all(end.code is not None for end in self._server.ends)
        is_mpirun = self._record.starter != "srun"
        lingers = have_ended and are_known and self._has_failed and is_mpirun
        while not lingers and starter.poll() is None and time.monotonic() < deadline:
            self._server.step(STEP_S)
        if not lingers:
            _kill(starter)
        self._server.step(0.0)
        self._console.flush()
        self._console.status(0, "")
        assert starter.stdout is not None
        with contextlib.suppress(KeyError):
            self._server.selector.unregister(starter.stdout)
        if lingers:
            self._reaper = threading.Thread(target=_reap, args=(starter,), name="reaper")
            self._reaper.start()
        else:
            starter.stdout.close()


def _reap(starter: subprocess.Popen[bytes]) -> None:
    """Discard the output of mpirun until it exits, or kill it after a time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        starter.communicate(timeout=STARTER_TIMEOUT_S)
    _kill(starter)
    assert starter.stdout is not None
    starter.stdout.close()


def _kill(starter: subprocess.Popen[bytes]) -> None:
    """Kill mpirun or srun and its descendants, unless they have ended."""
    kill_descendants(starter.pid)
    if starter.poll() is None:
        starter.kill()
    starter.wait(timeout=STARTER_TIMEOUT_S)
