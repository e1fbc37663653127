"""The supervision of an attempt. A small program replaces mpirun, and everything else is real."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdtrain.agent.messages import JOB, format_addresses
from hvdtrain.agent.process_tree import descendants
from hvdtrain.config import LAUNCHER
from hvdtrain.errors import LaunchError
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.commands import Command
from hvdtrain.launch.console import Console
from hvdtrain.launch.supervisor import Supervisor, TimeLimits, caught_signals, pause
from hvdtrain.log import configure_log
from tests.agent.processes import assert_all_end
from tests.harness.jobs import REPOSITORY

# A program that starts an agent for each rank, as mpirun does, and passes the rank to it.
STARTER = """
import os, subprocess, sys
def start(rank, program):
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    environ = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}
    agent = [sys.executable, "-m", "hvdtrain.agent.rank_agent"]
    return subprocess.Popen([*agent, sys.executable, "-c", program], env={**os.environ, **environ})
"""
BOTH = STARTER + "ranks = [start(rank, sys.argv[1]) for rank in (0, 1)]\n"
RANK = 'import os, sys, time; rank = int(os.environ["OMPI_COMM_WORLD_RANK"])\n'


@dataclass
class Run:
    """The exit code and output of a job."""

    code: int
    out: str
    err: str
    seconds: float
    lingers: bool  # whether processes are left when the outcome is known

    def messages(self) -> list[str]:
        """Return the messages of the launcher."""
        mark = "hvdtrain run: "
        return [line.removeprefix(mark) for line in self.err.splitlines() if line.startswith(mark)]


def run(*argv: str, start_timeout_s: float = 60.0, grace_s: float = 2.0) -> Run:
    """Supervise ``argv``, which should start two ranks, on node1 and node2."""
    before = descendants(os.getpid())
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, ranks=2)
    configure_log("info", prefix="", write=console.notice)
    with (
        contextlib.closing(AgentServer(2, console, local=True)) as server,
        caught_signals() as received,
    ):
        variables = {LAUNCHER: format_addresses(["127.0.0.1"], server.port), JOB: server.secret}
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
        supervisor = Supervisor(
            Command(argv=argv, environ=environ),
            server,
            console,
            hosts={0: "node1", 1: "node2"},
            time_limits=TimeLimits(start_s=start_timeout_s, grace_s=grace_s),
            received=received,
        )
        started = time.monotonic()
        outcome = supervisor.run()
        lingers = descendants(os.getpid()) != before
        supervisor.close()
        seconds = time.monotonic() - started
    for message in outcome.messages:
        console.notice(message)
    assert descendants(os.getpid()) == before, "no process is left"
    return Run(outcome.code, out.getvalue(), err.getvalue(), seconds, lingers)


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


NAME = os.path.basename(sys.executable)


def test_success() -> None:
    code = BOTH + "sys.exit(max(rank.wait() for rank in ranks))"
    done = run(*python(code, RANK + "print('hello from', rank)"))
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]


def test_mpirun_starts_no_rank() -> None:
    done = run(*python("print('no such host: node2', flush=True); raise SystemExit(1)"))
    assert done.code == 125
    assert done.messages()[0].startswith("ranks 0, 1 did not start on node1, node2")
    assert done.messages()[-2:] == [f"output of {NAME}:", "  no such host: node2"]


def test_mpirun_prints_nothing() -> None:
    done = run(*python("pass"))
    assert done.code == 125
    assert "did not start" in done.err
    assert "output of" not in done.err


@pytest.mark.slow
def test_mpirun_hangs_and_its_child_ignores_sigterm(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    pid = tmp_path / "pid"
    code = f"""if True:
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {deaf!r}])
        open({str(pid)!r}, "w").write(str(child.pid))
        child.wait()
    """
    done = run(*python(code), start_timeout_s=3)
    assert done.code == 125
    assert done.messages()[0].startswith("ranks 0, 1 did not start within 3 s on node1, node2")
    assert done.seconds < 30
    assert_all_end([int(pid.read_text())])


def test_mpirun_starts_one_of_two_ranks(tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    code = STARTER + (
        f"import time; start(0, sys.argv[1])\nwhile not os.path.exists({ready!r}): time.sleep(0.02)"
    )
    program = RANK + f"print('alone', flush=True); open({ready!r}, 'w').close(); time.sleep(60)"
    done = run(*python(code, program))
    assert done.code == 125
    assert done.out == "[0] alone\n"
    assert done.messages()[0].startswith("rank 1 did not start on node2")
    assert "failed first" not in done.err


@pytest.mark.parametrize(("mode", "why"), [(0o644, "Permission denied"), (None, "No such file")])
def test_mpirun_can_not_be_executed(tmp_path: Path, mode: int | None, why: str) -> None:
    path = tmp_path / "mpirun"
    if mode is not None:
        path.touch(mode)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(LaunchError, match=f"mpirun can't be started: {why}"):
        run(str(path))
    assert signal.getsignal(signal.SIGTERM) == before


def test_mpirun_fails_after_the_ranks() -> None:
    code = BOTH + "[rank.wait() for rank in ranks]; print('can not clean up\\n  '); sys.exit(9)"
    done = run(*python(code, "pass"))
    assert done.code == 9
    assert done.messages() == [
        f"{NAME}: can not clean up",
        f"{NAME} exited with code 9",
        "can not clean up",
    ]


@pytest.mark.slow
def test_the_next_attempt_need_not_wait_for_mpirun() -> None:
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = ignores + BOTH + "[rank.wait() for rank in ranks]; time.sleep(60)"
    done = run(*python(code, "import time; time.sleep(2); exit(3)"))
    assert (done.code, done.lingers) == (3, True), done
    assert done.seconds < 30


@pytest.mark.slow
def test_output_of_mpirun_about_a_failed_rank_is_hidden() -> None:
    code = BOTH + (
        "codes = [rank.wait() for rank in ranks]\n"
        "print('a process ended with', max(codes)); sys.exit(max(codes))"
    )
    program = RANK + "time.sleep(1)\nif rank == 1: sys.exit(7)\ntime.sleep(60)"
    done = run(*python(code, program))
    assert done.code == 7
    assert done.messages()[0].startswith("rank 1 on ")
    assert "a process ended" not in done.err


def send_when_ready(folder: Path, number: int, times: int) -> None:
    deadline = time.monotonic() + 30
    while len(os.listdir(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    for _ in range(times):
        os.kill(os.getpid(), number)
        time.sleep(0.3)


@pytest.mark.slow
def test_a_repeated_preemption_signal_is_forwarded_once(tmp_path: Path) -> None:
    """A second one would kill programs that are already exiting."""
    program = f"""
import signal
received = []
signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
open(os.path.join({str(tmp_path)!r}, str(rank)), "w").close()
while not received:
    time.sleep(0.02)
time.sleep(2)
print("received", len(received))
sys.exit(75)
"""

    sender = threading.Thread(target=send_when_ready, args=(tmp_path, signal.SIGUSR1, 2))
    sender.start()
    done = run(*python(BOTH + "[rank.wait() for rank in ranks]", RANK + program))
    sender.join(timeout=40)
    assert done.code == 75
    assert done.out.count("received 1\n") == 2, done


@pytest.mark.slow
def test_ranks_that_ignore_sigterm_are_killed_after_the_grace() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    program = RANK + deaf + "time.sleep(1)\nif rank == 0: sys.exit(3)\ntime.sleep(60)"
    done = run(*python(BOTH + "[rank.wait() for rank in ranks]", program), grace_s=0.5)
    assert done.code == 3
    assert done.seconds < 30


def test_caught_signals_collects_and_restores() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with caught_signals() as received:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with caught_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.timeout(60)
def test_a_signal_ends_a_pause() -> None:
    assert pause(0.0, [])
    with caught_signals() as received:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert not pause(1000.0, received)
        timer.join(30)
