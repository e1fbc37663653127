"""The agent of a rank: the process between the launcher and the rank's program.

mpirun or srun starts the agent instead of the program (``python -m hvdtrain.agent.rank_agent``).
The agent starts the program in a separate process group, and sends the program's output and exit
code to the launcher. It ends all processes of the rank when the launcher requests it, when mpirun
or srun sends a signal, or when the connection to the launcher is lost. So no process outlives the
job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from hvdtrain.agent.messages import BIND, JOB, LauncherLink, connect, parse_addresses
from hvdtrain.agent.oom import OomWatch
from hvdtrain.agent.output_relay import OutputRelay
from hvdtrain.agent.process_tree import (
    adopt_orphans,
    descendants,
    die_with_parent,
    is_stopped,
    kill_descendants,
    run_guarded,
    shell_code,
)
from hvdtrain.agent.rank_report import ReportPipe
from hvdtrain.agent.usage import GpuWatch, UsageWatch
from hvdtrain.cluster.placement import share_of_cores
from hvdtrain.cluster.topology import Topology, read_topology
from hvdtrain.config import LAUNCHER, variable_name
from hvdtrain.errors import HvdtrainError
from hvdtrain.exit_codes import ENDING, PREEMPTING, ExitCode, signal_name
from hvdtrain.log import configure_log

__all__ = ["main"]

logger = logging.getLogger(__package__)

# Seconds from SIGTERM to SIGKILL after the launcher is lost, and after a signal from mpirun or
# srun.
ORPHAN_GRACE_S = 5.0
SIGNAL_GRACE_S = 2.0
DRAIN_S = 0.5
FLUSH_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program in ``argv`` as this process's rank, and return the exit code for mpirun."""
    program = list(sys.argv[1:] if argv is None else argv)
    return run_guarded(lambda lifeline: _run_agent(program, lifeline))


def _run_agent(program: Sequence[str], lifeline: int) -> int:
    try:
        topology = read_topology(os.environ)
        launcher = connect(parse_addresses(os.environ[LAUNCHER]))
    except (HvdtrainError, OSError) as error:
        configure_log("error", prefix="hvdtrain run: ")
        logger.error(f"on host {socket.gethostname()}: {error}")
        return ExitCode.CANNOT_START
    return Agent(topology, launcher, os.environ).run(program, lifeline)


class _Stop(NamedTuple):
    """A request to stop after a failure: the signal, seconds until SIGKILL, and when at the latest.

    ``until`` is when a rank that is writing a checkpoint gets the signal, too.
    """

    number: int
    grace_s: float
    until: float


class Agent:
    """Runs the program of one rank."""

    def __init__(
        self, topology: Topology, launcher: socket.socket, environ: Mapping[str, str]
    ) -> None:
        self._topology = topology
        self._launcher = LauncherLink(launcher)
        self._environ = environ
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._deadline: float | None = None
        # After a failure, a rank that is writing a checkpoint is stopped later.
        self._postponed: _Stop | None = None
        self._is_dismissed = False
        self._is_orphan = False
        self._was_signalled = False
        self._passed_on: set[int] = set()
        self._elastic = environ.get(variable_name("elastic")) == "1"
        self._oom = OomWatch()
        self._gpus = GpuWatch()
        self._usage = UsageWatch(self._gpus)
        self._child: subprocess.Popen[bytes] | None = None
        self._report_pipe = ReportPipe()
        self._output = OutputRelay(self._selector, self._launcher)
        self._selector.register(self._launcher, selectors.EVENT_READ, self._read_launcher)
        host = socket.gethostname()
        self._launcher.send("hello", job=environ[JOB], rank=topology.rank, host=host)

    def run(self, program: Sequence[str], lifeline: int) -> int:
        """Run the program, report how it ended, and return the exit code for mpirun.

        Reading from ``lifeline`` reports the end of the file once mpirun or srun has killed the
        guard.
        """
        for number in (*ENDING, *PREEMPTING):
            signal.signal(number, lambda number, frame: self._signals.append(number))
        adopt_orphans()
        self._selector.register(lifeline, selectors.EVENT_READ, self._lose_guard)
        try:
            self._output.open_file(self._topology.rank, self._environ)
            self._start(program)
        except OSError as error:
            return self._report_start_failure(program, error)
        self._watch()
        return self._finish()

    def _start(self, program: Sequence[str]) -> None:
        self._child = subprocess.Popen(
            program,
            env={
                **_bind_cores(self._topology, self._environ),
                **self._environ,
                **self._report_pipe.variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # Hydra passes its PMI connection as an open file
            preexec_fn=die_with_parent,
        )
        if sys.platform == "linux":
            # Otherwise an end is only noticed when a wait times out.
            self._selector.register(
                os.pidfd_open(self._child.pid), selectors.EVENT_READ, self._close_pidfd
            )
        self._report_pipe.close_writer()
        self._selector.register(self._report_pipe, selectors.EVENT_READ, self._read_reports)
        self._output.listen(self._child)

    def _close_pidfd(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _report_start_failure(self, program: Sequence[str], error: OSError) -> int:
        """Report that the program can't be started, with the exit code that a shell would use."""
        name = error.filename or (program[0] if program else "")
        self._output.relay_line("stderr", f"{name}: {error.strerror}")
        self._output.finish()
        code = 127 if isinstance(error, FileNotFoundError) else 126
        self._report_end(code)
        return self._await_dismissal(code)

    def _watch(self) -> None:
        assert self._child is not None
        while self._child.poll() is None:
            self._oom.look(self._child.pid)
            if (usage := self._usage.look(self._child.pid)) is not None:
                self._launcher.send("usage", **asdict(usage))
            self._wait(0.05)
            self._output.update_pause()
            self._handle_signals()
            if self._postponed is not None:
                self._stop_after_failure(self._postponed)
            if self._deadline is not None and time.monotonic() > self._deadline:
                kill_descendants(os.getpid())

    def _wait(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fileobj)
        if self._launcher.is_lost and not self._is_orphan:
            self._is_orphan = True
            self._selector.unregister(self._launcher)
            self._is_dismissed = True
            self._stop(signal.SIGTERM, ORPHAN_GRACE_S)

    def _read_reports(self, pipe: ReportPipe) -> None:
        messages = pipe.read()
        if messages is None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
        self._gpus.own = pipe.gpu_id
        for message in messages or ():
            self._launcher.send(**message)

    def _read_launcher(self, launcher: LauncherLink) -> None:
        for message in launcher.receive():
            if message["kind"] == "stop":
                number, grace_s = int(message["signal"]), float(message["grace_s"])
                if (write_s := float(message.get("write_s", 0.0))) > 0:
                    self._stop_after_failure(_Stop(number, grace_s, time.monotonic() + write_s))
                else:
                    self._stop(number, grace_s)
            elif message["kind"] == "kill" and self._child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGKILL)
            elif message["kind"] == "look":
                self._inspect_hang()
            elif message["kind"] == "bye":
                self._is_dismissed = True

    def _lose_guard(self, lifeline: int) -> None:
        self._selector.unregister(lifeline)
        self._launcher.send("told", signal=int(signal.SIGKILL))
        self._is_dismissed = True
        self._stop(signal.SIGTERM, SIGNAL_GRACE_S)

    def _inspect_hang(self) -> None:
        """Report whether the program is stopped, and make it print the stacks of its threads."""
        assert self._child is not None
        pid = self._reporting_pid()
        stopped = any(is_stopped(one) for one in (self._child.pid, pid) if one is not None)
        self._launcher.send("looked", stopped=stopped)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT)

    def _reporting_pid(self) -> int | None:
        """Return the ID of the process that sends reports, or None if no such process runs."""
        pid = self._report_pipe.pid
        return pid if pid in descendants(os.getpid()) else None

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._launcher.send("told", signal=number)
            self._stop(number, SIGNAL_GRACE_S if number in ENDING else None)

    def _stop_after_failure(self, stop: _Stop) -> None:
        """Stop the program after its checkpoint in progress, because another rank has failed."""
        self._read_reports(self._report_pipe)
        latest = self._report_pipe.latest
        is_writing = latest.get("writing") is True and time.monotonic() < stop.until
        self._postponed = stop if is_writing else None
        if not is_writing:
            # Without the failed rank, the others can't save a checkpoint together.
            is_futile = latest.get("saves_on_signal") is True
            self._stop(stop.number, 0.0 if is_futile else stop.grace_s)

    def _stop(self, number: int, grace_s: float | None) -> None:
        """Send a signal to the program, and SIGKILL after ``grace_s`` seconds unless it is None."""
        self._was_signalled = True
        if self._child is None or self._child.poll() is not None:
            return
        # Slurm and the launcher may both send a warning. A program that is already ending because
        # of the first warning may not catch the second one.
        if number not in self._passed_on:
            self._pass_on(number, self._child.pid)
        if grace_s is not None:
            deadline = time.monotonic() + grace_s
            self._deadline = min(self._deadline or deadline, deadline)

    def _pass_on(self, number: int, program: int) -> None:
        pid = None
        if number in PREEMPTING:
            self._passed_on.add(number)
            # The signal must not reach the program's child processes. It would kill them, but the
            # program may need them to save its state.
            pid = self._reporting_pid()
        with contextlib.suppress(ProcessLookupError):
            if pid is None:
                os.killpg(program, number)
            else:
                os.kill(pid, number)

    def _finish(self) -> int:
        """Relay the remaining output, end the remaining processes, and report the exit code."""
        assert self._child is not None
        code = shell_code(self._child.returncode)
        is_lost = self._elastic and not self._was_signalled and signal_name(code) is not None
        if is_lost:
            # The other ranks wait until mpirun reports the loss, so don't wait for processes that
            # keep the output open.
            kill_descendants(os.getpid())
        self._output.resume()
        deadline = time.monotonic() + DRAIN_S
        while self._output.is_open and time.monotonic() < deadline:
            self._wait(0.02)
        self._read_reports(self._report_pipe)
        kill_descendants(os.getpid())
        self._output.finish()
        self._report_end(code)
        if is_lost:
            # mpirun continues without this rank and must not see an error.
            self._flush()
            return 0
        return self._await_dismissal(code)

    def _report_end(self, code: int) -> None:
        kills = asdict(self._oom.kills()) if code != 0 else None
        self._launcher.send("end", code=code, kills=kills)

    def _await_dismissal(self, code: int) -> int:
        """Wait until the launcher sends ``bye``.

        If this process exited earlier, mpirun and srun would end the other ranks. If the launcher
        is gone, the wait ends within seconds, because the connection is then lost.
        """
        while not self._is_dismissed:
            self._wait(0.05)
            # A signal from mpirun also ends the wait.
            self._is_dismissed = self._is_dismissed or bool(self._signals)
        self._flush()
        return code

    def _flush(self) -> None:
        """Wait until the launcher has received all messages."""
        deadline = time.monotonic() + FLUSH_S
        while self._launcher.is_full and time.monotonic() < deadline:
            self._wait(0.05)


def _bind_cores(place: Topology, environ: Mapping[str, str]) -> dict[str, str]:
    """Bind this process to its rank's cores, and return environment variables for the program.

    The variables limit the threads of libraries. Without them, every library would start a thread
    for each core of the host.
    """
    if not hasattr(os, "sched_getaffinity"):
        return {}
    cores = sorted(os.sched_getaffinity(0))
    # If Slurm allocated fewer cores but didn't bind this process, the allocated cores are unknown.
    allowed = min(len(cores), int(environ.get("SLURM_CPUS_ON_NODE", len(cores))))
    share = share_of_cores(place.local_rank, place.local_size, allowed) or (0, 0)
    if place.local_size <= allowed == len(cores) and environ.get(BIND) != "0":
        os.sched_setaffinity(0, cores[share[0] : share[1] + 1])
    threads = str(share[1] - share[0] + 1)
    return {"TF_NUM_INTRAOP_THREADS": threads, "OMP_NUM_THREADS": threads}


if __name__ == "__main__":
    sys.exit(main())
