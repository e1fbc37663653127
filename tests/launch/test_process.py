"""A process tree starts, gets its signals, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.commands import Command
from hvdtrain.launch.process import run_to_end
from tests.harness.jobs import REPOSITORY
from tests.launch.processes import alive, assert_all_end

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20.0


def run_python(body: str) -> int:
    argv = (sys.executable, "-c", textwrap.dedent(body))
    return run_to_end(Command(argv=argv, environ=dict(os.environ)), grace_s=1.0)


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_programs_own_exit_code(code: int) -> None:
    assert run_python(f"raise SystemExit({code})") == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_becomes_128_and_its_number(number: int) -> None:
    assert run_python(f"import os; os.kill(os.getpid(), {number})") == 128 + number


def test_output_passes_through_and_there_is_no_input(capfd: pytest.CaptureFixture[str]) -> None:
    code = run_python(
        """
        import os, sys
        print("out", repr(sys.stdin.read()))
        print("err", file=sys.stderr)
        assert os.getsid(0) == os.getpid(), "a session of its own"
        """
    )
    assert code == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("out ''\n", "err\n")


def test_environment_is_the_commands_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_to_end(Command(argv=("/usr/bin/env",), environ={"ONLY": "this"}), grace_s=1.0) == 0
    assert capfd.readouterr().out == "ONLY=this\n"


def test_what_can_not_be_started_is_an_error(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    missing = Command(argv=(str(tmp_path / "mpirun"),), environ={})
    with pytest.raises(LaunchError, match="can't be started: No such file"):
        run_to_end(missing, grace_s=1.0)
    assert signal.getsignal(signal.SIGTERM) == before, "handlers are taken back"


class Job:
    """``run_to_end`` in a process of its own, so that it can be sent signals."""

    def __init__(self, folder: Path, body: str, grace_s: float) -> None:
        self.pids = folder / "pids"
        program = f"""
            import os, signal, subprocess, sys, time
            def here():
                with open({str(self.pids)!r}, "a") as file:
                    file.write(str(os.getpid()) + "\\n")
        """
        inner = textwrap.dedent(program) + textwrap.dedent(body)
        outer = f"""
            import os, sys
            from hvdtrain.launch.commands import Command
            from hvdtrain.launch.process import run_to_end
            command = Command(argv=(sys.executable, "-c", {inner!r}), environ=dict(os.environ))
            sys.exit(run_to_end(command, grace_s={grace_s}))
        """
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(outer)],
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def started(self, count: int) -> list[int]:
        """Wait until ``count`` processes of the job are there; returns their ids."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            lines = self.pids.read_text().split() if self.pids.exists() else []
            if len(lines) >= count:
                return [int(line) for line in lines]
            time.sleep(0.02)
        raise AssertionError(f"{count} processes did not start within {WAIT_S} s")

    def ended(self) -> int:
        return self.process.wait(timeout=WAIT_S)


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(body: str, grace_s: float = 5.0) -> Job:
        jobs.append(Job(tmp_path, body, grace_s))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait(timeout=WAIT_S)
        for line in job.pids.read_text().split() if job.pids.exists() else []:
            if alive(int(line)):
                os.kill(int(line), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(start_job, number: int) -> None:
    job = start_job(
        f"""
        def stop(number, frame):
            print("stopping", flush=True)
            sys.exit(3)
        signal.signal({int(number)}, stop)
        here()
        time.sleep(60)
        """
    )
    pids = job.started(1)
    job.process.send_signal(number)
    assert job.ended() == 128 + number
    assert_all_end(pids)


DEAF_TREE = """
    # As mpirun's ranks do, one child leads a process group of its own and one even a session.
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    code = "import os,time; open(PIDS,'a').write(str(os.getpid())+chr(10)); time.sleep(60)"
    code = deaf + code.replace("PIDS", repr(PIDS))
    subprocess.Popen([sys.executable, "-c", "import os; os.setpgid(0, 0);" + code])
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here()
    time.sleep(60)
"""


def test_what_stays_after_the_deadline_is_killed(start_job, tmp_path: Path) -> None:
    pids_path = repr(str(tmp_path / "pids"))
    job = start_job(f"PIDS = {pids_path}\n" + textwrap.dedent(DEAF_TREE), grace_s=0.5)
    pids = job.started(3)
    began = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.ended() == 128 + signal.SIGTERM
    assert 0.4 < time.monotonic() - began < 5
    assert_all_end(pids)


def test_a_second_interrupt_ends_it_at_once(start_job) -> None:
    job = start_job(
        "signal.signal(signal.SIGINT, signal.SIG_IGN); here(); time.sleep(60)", grace_s=50.0
    )
    pids = job.started(1)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert alive(pids[0])
    job.process.send_signal(signal.SIGINT)
    assert job.ended() == 128 + signal.SIGINT
    assert_all_end(pids)


def test_children_of_a_killed_leader_are_ended(start_job) -> None:
    job = start_job(
        """
        if os.fork() == 0:
            os.setpgid(0, 0)
        here()
        time.sleep(60)
        """
    )
    pids = job.started(2)
    leader = next(pid for pid in pids if os.getsid(pid) == pid)
    os.kill(leader, signal.SIGKILL)
    assert job.ended() == 128 + signal.SIGKILL
    assert_all_end(pids)


def test_what_nohup_ignores_stays_ignored(start_job, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = start_job("here(); time.sleep(2)")
    finally:
        signal.signal(signal.SIGHUP, before)
    job.started(1)
    job.process.send_signal(signal.SIGHUP)
    assert job.ended() == 0
