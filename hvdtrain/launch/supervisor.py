"""Starts a job, watches it and sees it to its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import IO, Literal

from hvdtrain.cluster.listing import listing
from hvdtrain.errors import LaunchError
from hvdtrain.launch.commands import Command
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import ExitCode, describe, exit_code, first_failure
from hvdtrain.launch.hub import Hub
from hvdtrain.launch.output import LineSplitter
from hvdtrain.launch.tree import kill_descendants, shell_code

__all__ = ["Supervisor"]

STEP_S = 0.05
# After a rank has failed the others, which learn of it from each other, may end by themselves.
SETTLE_S = 0.5
# mpirun and srun tidy up after the last rank.
STARTER_TIMEOUT_S = 5.0
KEPT_LINES = 40
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PREEMPTING = (signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """One job from its start to its end; call ``run`` once, from the main thread.

    Args:
        command: Starts an agent for each rank: mpirun or srun.
        hub: Where the agents report.
        console: For the starter's own words and the verdict.
        hosts: Of the ranks, as planned.
        grace_s: Between asking ranks to end and killing them.
        start_timeout_s: For all agents to report.
    """

    def __init__(
        self,
        command: Command,
        hub: Hub,
        console: Console,
        *,
        hosts: Mapping[int, str],
        grace_s: float,
        start_timeout_s: float,
    ) -> None:
        self._command = command
        self._hub = hub
        self._console = console
        self._hosts = hosts
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._name = os.path.basename(command.argv[0])
        self._received: list[int] = []
        self._acted_on = 0
        self._words: deque[str] = deque(maxlen=KEPT_LINES)
        self._stop_at: float | None = None
        self._give_up_at: float | None = None
        self._late = False

    def run(self) -> int:
        """Run the job; returns the exit code of ``hvdtrain run``.

        Raises:
            LaunchError: mpirun or srun can't be started.
        """
        with self._caught_signals():
            starter = self._start()
            try:
                self._watch(starter)
            finally:
                self._end(starter)
        return self._verdict(starter.returncode)

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
        splitter = LineSplitter()
        self._hub.selector.register(
            starter.stdout, selectors.EVENT_READ, lambda pipe: self._overhear(pipe, splitter)
        )
        return starter

    def _overhear(self, pipe: IO[bytes], splitter: LineSplitter) -> None:
        """What mpirun or srun says by itself: shown unless it only comments on a failed rank."""
        data = os.read(pipe.fileno(), 1 << 16)
        for line in splitter.feed(data, final=not data):
            self._words.append(line)
            if self._hub.connected and not self._failed:
                self._console.notice(f"{self._name}: {line}")
        if not data:
            self._hub.selector.unregister(pipe)

    @property
    def _failed(self) -> bool:
        return any(end.code != 0 for end in self._hub.ends)

    def _watch(self, starter: subprocess.Popen[bytes]) -> None:
        started = time.monotonic()
        while True:
            self._hub.step(STEP_S)
            now = time.monotonic()
            self._act_on_signals()
            if self._failed and self._stop_at is None:
                self._stop_at = now + SETTLE_S
            if self._hub.connected < self._hub.ranks and now - started > self._start_timeout_s:
                self._late = True
            gone = starter.poll() is not None
            if (gone or self._late) and self._stop_at is None:
                self._stop_at = now
            if self._stop_at is not None and now >= self._stop_at and self._give_up_at is None:
                self._hub.stop(signal.SIGTERM, self._grace_s)
                self._give_up_at = now + self._grace_s + STARTER_TIMEOUT_S
            if not self._hub.running:
                if self._failed or self._hub.connected == self._hub.ranks or gone or self._late:
                    return
            elif self._give_up_at is not None and now > self._give_up_at:
                return
            if not self._failed:
                self._hub.dismiss()

    def _act_on_signals(self) -> None:
        for number in self._received[self._acted_on :]:
            self._acted_on += 1
            impatient = self._received.count(signal.SIGINT) > 1
            if impatient:
                self._hub.stop(signal.SIGKILL, 0.0)
            else:
                number = number if number in _ENDING else signal.SIGTERM
                self._hub.stop(number, self._grace_s)
            now = time.monotonic()
            self._stop_at = self._stop_at or now
            self._give_up_at = self._give_up_at or now + self._grace_s + STARTER_TIMEOUT_S

    def _end(self, starter: subprocess.Popen[bytes]) -> None:
        """Let agents and starter go; kill what doesn't."""
        self._hub.dismiss()
        deadline = time.monotonic() + STARTER_TIMEOUT_S
        if self._late or self._hub.running or self._hub.connected < self._hub.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGTERM)
        while starter.poll() is None and time.monotonic() < deadline:
            self._hub.step(STEP_S)
        kill_descendants(starter.pid)
        if starter.poll() is None:
            starter.kill()
        starter.wait(timeout=STARTER_TIMEOUT_S)
        self._hub.step(0.0)
        self._hub.settle()
        assert starter.stdout is not None
        with contextlib.suppress(KeyError):
            self._hub.selector.unregister(starter.stdout)
        starter.stdout.close()

    def _verdict(self, starter_code: int) -> int:
        """Say what went wrong, if anything, and give the exit code for it."""
        first = first_failure(self._hub.ends)
        if self._received:
            number = self._received[0]
            preempted = number in _PREEMPTING
            name = signal.Signals(number).name
            self._console.notice(f"the job was ended by {name}")
            return ExitCode.PREEMPTED if preempted else 128 + number
        missing = sorted(set(self._hosts) - set(self._hub.hosts()))
        # Ranks that were told to end because others did not start have not failed.
        if first is not None and not (missing and first.bidden):
            self._console.notice(describe(first))
            return exit_code(first)
        if missing:
            self._explain_missing(missing)
            return ExitCode.CANNOT_START
        if starter_code != 0:
            code = shell_code(starter_code)
            self._console.notice("\n".join([f"{self._name} ended with code {code}", *self._words]))
            return code
        return 0

    def _explain_missing(self, missing: list[int]) -> None:
        # Seldom needed, and much of hvdtrain check comes with them.
        from hvdtrain.launch.diagnosis import show_problem
        from hvdtrain.launch.unstarted import unstarted

        hosts = dict.fromkeys(self._hosts[rank] for rank in missing)
        late = f" within {self._start_timeout_s:g} s" if self._late else ""
        self._console.notice(f"rank {listing(missing)} did not start{late} on {listing(hosts)}")
        way: Literal["srun", "ssh"] = "srun" if self._name == "srun" else "ssh"
        problems = unstarted(self._words, list(hosts), way=way, python=sys.executable)
        if problems:
            self._console.notice("\n".join(map(show_problem, problems)))
            return
        self._console.notice(
            "each host needs this Python and the program at the same path, and must be reached "
            "from here (hvdtrain check tells)"
        )
        if self._words:
            said = [line for line in self._words if line.strip()]
            self._console.notice("\n".join([f"{self._name} said:", *("  " + s for s in said)]))

    @contextlib.contextmanager
    def _caught_signals(self) -> Iterator[None]:
        """Collect the signals that arrive instead of dying of them; undone at the end."""

        def note(number: int, frame: FrameType | None) -> None:
            self._received.append(number)

        # What was ignored when this process started (nohup) stays ignored.
        caught = [
            number
            for number in (*_ENDING, *_PREEMPTING)
            if signal.getsignal(number) != signal.SIG_IGN
        ]
        previous = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
