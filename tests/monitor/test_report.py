"""Reports of programs. Each program is a process, and the test reads the other end of its pipe."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.agent.rank_report import RankReport, read_record
from hvdtrain.config import REPORT_FD
from tests.harness.jobs import REPOSITORY

INTERVAL_S = 1.0


class Program:
    """A process with a report pipe."""

    def __init__(self, code: str, *, inode: int | None = None) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        number = os.fstat(writer).st_ino if inode is None else inode
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from hvdtrain.monitor import report\n" + textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), REPORT_FD: f"{writer}:{number}"},
            pass_fds=(writer,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writer)
        self._data = b""

    def reports(self) -> list[dict[str, Any]]:
        """Return all reports so far."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reader, 1 << 16):
                self._data += data
        return [json.loads(line) for line in self._data.splitlines()]

    def failure(self) -> dict[str, Any]:
        """Return the failure record."""
        (failure,) = [report for report in self.reports() if report["kind"] == "failure"]
        return failure

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the newest report fulfils a condition, and return it."""
        deadline = time.monotonic() + 20
        while not (reports := self.reports()) or not condition(reports[-1]):
            assert time.monotonic() < deadline, reports
            time.sleep(0.01)
        return reports[-1]

    def end(self) -> tuple[str, str]:
        """Close stdin, and return stdout and stderr."""
        out, err = self.process.communicate(timeout=30)
        return out, err

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)
        os.close(self.reader)


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    with contextlib.ExitStack() as stack:

        def begin(code: str, **options: Any) -> Program:
            return stack.enter_context(contextlib.closing(Program(code, **options)))

        yield begin


WAIT = "import sys; sys.stdin.read()"


def test_the_state_is_reported(start) -> None:
    program = start(f"""
        report.resumed(40)
        report.phase("training")
        report.step(41, 2)
        report.saved(41)
        {WAIT}
    """)
    program.wait_for(lambda report: report.get("saved") == 41)
    first, *_, last = program.reports()
    pid = program.process.pid
    assert first == {"kind": "report", "pid": pid, "resumed": 40, "phase": "", "waiting_in": ""}
    expected = {"step": 41, "epoch": 2, "saved": 41, "resumed": 40, "phase": "training"}
    assert last == {"kind": "report", "pid": pid, **expected, "waiting_in": ""}


def test_some_steps_are_reported_and_always_the_last(start) -> None:
    program = start("for step in range(100_000): report.step(step, 0)\nraise ValueError")
    assert "ValueError" in program.end()[1]
    reports = program.reports()
    assert reports[-1]["step"] == 99_999
    assert len(reports) < 20


@pytest.mark.slow
def test_waits_are_reported_once(start) -> None:
    program = start(f"""
        report.watch(lambda: "allreduce(gradients)")
        {WAIT}
    """)
    program.wait_for(lambda report: report["waiting_in"] == "allreduce(gradients)")
    before = len(program.reports())
    time.sleep(2.5 * INTERVAL_S)
    assert len(program.reports()) == before, "an unchanged state is not repeated"


def test_a_failing_callback_is_ignored(start) -> None:
    program = start(f"report.watch(lambda: 1 / 0); report.saved(7); {WAIT}")
    assert program.wait_for(lambda report: report.get("saved") == 7)["waiting_in"] == ""


def test_a_failure_is_reported_with_its_cause(start) -> None:
    program = start("""
        try:
            try:
                {}["x"]
            except KeyError as error:
                cause = error
                raise ValueError("b" * 9000) from error
        except ValueError as error:
            report.failed(cause, error)
    """)
    assert program.end() == ("", "")
    failure = program.failure()
    assert (failure["exception"], failure["message"]) == ("KeyError", "'x'")
    assert abs(failure["time_s"] - time.time()) < 60
    assert "Traceback (most recent call last)" in failure["traceback"]
    assert "KeyError: 'x'" in failure["traceback"], "only the long line is shortened"


def test_an_uncaught_exception_is_reported(start) -> None:
    program = start("report.phase('training'); raise ValueError('no such batch')")
    assert "ValueError: no such batch" in program.end()[1]
    failure = program.failure()
    assert (failure["exception"], failure["message"]) == ("ValueError", "no such batch")


def test_a_long_traceback_is_reported_without_its_middle(start) -> None:
    program = start("""
        def fall(depth):
            if depth == 0:
                raise ValueError("ö" * 40)
            # Alternating, as Python abbreviates repeated lines.
            (fall if depth % 2 else lambda depth: fall(depth))(depth - 1)
        try:
            fall(200)
        except ValueError as error:
            report.failed(error, error)
    """)
    assert program.end() == ("", "")
    text = program.failure()["traceback"]
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: " + "ö" * 40
    assert 1000 < len(text) < 4096


def test_invalid_values_are_ignored(start) -> None:
    program = start("report.step('x', object()); report.saved(None); report.phase('y'); print(1)")
    assert program.end() == ("1\n", "")
    reports = program.reports()
    assert reports[-1]["phase"] == "y"
    assert not [report for report in reports if {"step", "epoch", "saved"} & report.keys()]


@pytest.mark.parametrize("number", [0, 1])
def test_another_file_with_the_same_descriptor_is_not_written(start, number: int) -> None:
    program = start("report.saved(1); report.phase('x'); print(1)", inode=number)
    assert program.end() == ("1\n", "")
    assert program.reports() == []


def test_without_a_launcher_nothing_happens() -> None:
    code = (
        "import signal, threading; from hvdtrain.monitor import report\n"
        "signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # background processes may ignore it\n"
        "report.step(1, 0); report.saved(1); report.phase('x'); report.watch(str)\n"
        "print(threading.active_count(), signal.getsignal(signal.SIGQUIT).name, report.is_heard())"
    )
    environ = {name: value for name, value in os.environ.items() if name != REPORT_FD}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environ, capture_output=True, timeout=30
    )
    assert (done.stdout, done.stderr) == (b"1 SIG_DFL False\n", b"")


def test_sigquit_prints_stacks_even_of_a_background_program(start) -> None:
    # A shell starts background programs with SIGQUIT ignored.
    program = start(
        "import signal, sys; signal.signal(signal.SIGQUIT, signal.SIG_IGN)\n"
        "report.phase('x'); print(report.is_heard(), flush=True); sys.stdin.read()"
    )
    program.wait_for(lambda report: report["pid"] == program.process.pid)
    program.process.send_signal(signal.SIGQUIT)
    program.process.stdin.close()
    program.process.stdin = None
    out, err = program.end()
    assert out == "True\n"
    assert "most recent call first" in err


def test_child_processes_do_not_report(start) -> None:
    program = start(f"""
        import os, subprocess, sys
        report.saved(1)
        if os.fork() == 0:
            report.saved(2)
            os._exit(0)
        os.wait()
        code = "from hvdtrain.monitor import report; report.saved(3)"
        subprocess.run([sys.executable, "-c", code], close_fds=False, check=True)
        report.phase("over")
        {WAIT}
    """)
    program.wait_for(lambda report: report["phase"] == "over")
    assert {report["saved"] for report in program.reports()} == {1}


def test_a_full_or_closed_pipe_does_not_disturb_the_program(start) -> None:
    program = start("""
        import sys
        for number in range(20_000): report.saved(number)
        print("full", flush=True)
        sys.stdin.readline()
        for number in range(20_000): report.saved(number)
        print("gone")
    """)
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == "full\n"
    assert all(report["kind"] == "report" for report in program.reports()), "lines are complete"
    reader, program.reader = program.reader, os.open(os.devnull, os.O_RDONLY)
    os.close(reader)
    out, err = program.process.communicate("\n", timeout=30)
    assert (out, err, program.process.returncode) == ("gone\n", "", 0)


def test_a_sigquit_handler_of_the_program_is_kept(start) -> None:
    program = start(f"""
        import signal
        signal.signal(signal.SIGQUIT, lambda *_: print("mine", flush=True))
        report.phase("training")
        {WAIT}
    """)
    assert program.wait_for(lambda report: report["phase"] == "training")["pid"] is None
    program.process.send_signal(signal.SIGQUIT)
    time.sleep(0.2)
    assert program.end() == ("mine\n", "")


def test_a_signal_handler_may_interrupt_a_report_with_another(start) -> None:
    program = start("""
        import signal
        calls = []
        def handle(*_):
            calls.append(1)
            report.phase(f"handler {len(calls)}")
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        number = 0
        while len(calls) < 300:
            number += 1
            report.saved(number)
        signal.setitimer(signal.ITIMER_REAL, 0)
    """)
    while program.process.poll() is None:
        program.reports()
        time.sleep(0.01)
    assert program.end()[1] == ""


def test_the_launcher_parses_reports(start, tmp_path: Path) -> None:
    program = start(f"""
        report.watch(lambda: "", lambda: 1.23456, lambda: 7 << 40)
        report.learned(640.0, 0.123456789)
        report.waited_for_input(1.5); report.waited_for_input(0.25)
        report.step(3, 1); report.phase('training'); report.saved(2)
        {WAIT}
    """)
    assert read_record(
        RankReport, program.wait_for(lambda report: report.get("saved") == 2)
    ) == RankReport(
        pid=program.process.pid,
        step=3,
        epoch=1,
        phase="training",
        saved=2,
        waited_s=1.235,
        input_s=1.75,
        reduced_bytes=7 << 40,
        samples=640,
        loss=0.123457,
    )


def test_functions_of_programs_may_return_numpy_numbers(start) -> None:
    program = start(f"""
        import numpy as np
        report.watch(lambda: "", lambda: np.float32(1.5), lambda: np.int32(7))
        report.saved(2)
        {WAIT}
    """)
    report = program.wait_for(lambda report: report.get("saved") == 2)
    assert (report["waited_s"], report["reduced_bytes"]) == (1.5, 7)


def test_invalid_numbers_are_neither_sent_nor_accepted(start) -> None:
    program = start(f"""
        report.watch(lambda: "", lambda: float("nan") / 0, lambda: float("inf"))
        report.learned(float("inf"), float("nan"))
        report.waited_for_input(float("nan"))
        report.saved(2)
        {WAIT}
    """)
    invalid = {
        "loss": float("nan"),
        "waited_s": "1",
        "input_s": True,
        "reduced_bytes": 0.5,
        "samples": 1.5,
    }
    assert not invalid.keys() & program.wait_for(lambda report: report.get("saved") == 2).keys()
    for name, value in invalid.items():
        assert read_record(RankReport, {"kind": "report", name: value}) is None


def test_a_nested_phase(start) -> None:
    program = start(f"""
        report.phase("training")
        with report.during("checkpoint"):
            pass
        {WAIT}
    """)
    program.wait_for(lambda _: len(program.reports()) >= 3)
    phases = [report["phase"] for report in program.reports()]
    assert phases == ["training", "checkpoint", "training"]
