"""What a rank's program tells its agent: real processes, and the test at the pipe's other end."""

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

from hvdtrain.config import REPORT_FD
from tests.harness.jobs import REPOSITORY

INTERVAL_S = 1.0


class Program:
    """A process with a pipe to report in."""

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
        """All that have come so far."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reader, 1 << 16):
                self._data += data
        return [json.loads(line) for line in self._data.splitlines()]

    def until(self, true: Callable[[dict[str, Any]], bool], timeout_s: float = 20.0) -> float:
        """Wait for a newest report; how long it took."""
        started = time.monotonic()
        while not (reports := self.reports()) or not true(reports[-1]):
            assert time.monotonic() - started < timeout_s, reports
            time.sleep(0.01)
        return time.monotonic() - started

    def end(self) -> tuple[str, str]:
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


def test_the_state_is_told(start: Callable[..., Program]) -> None:
    program = start(f"""
        report.resumed(40)
        report.phase("training")
        report.step(41, 2)
        report.saved(41)
        {WAIT}
    """)
    program.until(lambda report: report.get("saved") == 41)
    first, *_, last = program.reports()
    pid = program.process.pid
    assert first == {"kind": "report", "pid": pid, "resumed": 40, "phase": "", "waiting_in": ""}
    expected = {"step": 41, "epoch": 2, "saved": 41, "resumed": 40, "phase": "training"}
    assert last == {"kind": "report", "pid": pid, **expected, "waiting_in": ""}


def test_steps_are_told_now_and_then_and_the_last_at_the_end(start) -> None:
    program = start("for step in range(100_000): report.step(step, 0)\nraise ValueError")
    assert "ValueError" in program.end()[1]
    reports = program.reports()
    assert reports[-1]["step"] == 99_999
    assert len(reports) < 20


@pytest.mark.slow
def test_what_changes_is_told_while_the_program_waits(start) -> None:
    program = start(f"""
        words = ["", "allreduce(gradients)"]
        report.watch(lambda: words[-1])
        {WAIT}
    """)
    program.until(lambda report: report["waiting_in"] == "allreduce(gradients)")
    before = len(program.reports())
    time.sleep(2.5 * INTERVAL_S)
    assert len(program.reports()) == before, "nothing new is not told again"


def test_who_is_asked_may_fail(start) -> None:
    program = start(f"report.watch(lambda: 1 / 0); report.saved(7); {WAIT}")
    program.until(lambda report: report.get("saved") == 7)
    assert program.reports()[-1]["waiting_in"] == ""


def test_why_the_program_ends_is_told(start) -> None:
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
    failure = next(told for told in program.reports() if told["kind"] == "failure")
    assert (failure["exception"], failure["message"]) == ("KeyError", "'x'")
    assert abs(failure["time_s"] - time.time()) < 60
    assert "Traceback (most recent call last)" in failure["traceback"]
    assert "KeyError: 'x'" in failure["traceback"], "all but what a pipe doesn't take as a whole"


def test_an_exception_is_recorded_without_init(start) -> None:
    program = start("report.phase('training'); raise ValueError('no such batch')")
    assert "ValueError: no such batch" in program.end()[1]
    (failure,) = [told for told in program.reports() if told["kind"] == "failure"]
    assert (failure["exception"], failure["message"]) == ("ValueError", "no such batch")


def test_a_long_traceback_is_told_without_its_middle(start) -> None:
    program = start("""
        def fall(depth):
            if depth == 0:
                raise ValueError("ö" * 40)
            # So that Python doesn't leave out lines that repeat.
            (fall if depth % 2 else lambda depth: fall(depth))(depth - 1)
        try:
            fall(200)
        except ValueError as error:
            report.failed(error, error)
    """)
    assert program.end() == ("", "")
    (failure,) = [told for told in program.reports() if told["kind"] == "failure"]
    lines = failure["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: " + "ö" * 40
    assert 1000 < len(failure["traceback"]) < 4096


def test_nonsense_reaches_nobody(start) -> None:
    program = start("report.step('x', object()); report.saved(None); report.phase('y'); print(1)")
    assert program.end() == ("1\n", "")
    assert program.reports() == []


@pytest.mark.parametrize("number", [0, 1])
def test_another_file_of_that_number_is_left_alone(start, number: int) -> None:
    program = start("report.saved(1); report.phase('x'); print(1)", inode=number)
    assert program.end() == ("1\n", "")
    assert program.reports() == []


def test_without_the_variable_nothing_happens() -> None:
    code = (
        "import signal, threading; from hvdtrain.monitor import report\n"
        "signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # in the background it may be ignored\n"
        "report.step(1, 0); report.saved(1); report.phase('x'); report.watch(str)\n"
        "print(threading.active_count(), signal.getsignal(signal.SIGQUIT).name)"
    )
    environ = {name: value for name, value in os.environ.items() if name != REPORT_FD}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environ, capture_output=True, timeout=30
    )
    assert (done.stdout, done.stderr) == (b"1 SIG_DFL\n", b"")


def test_a_program_in_the_background_shows_its_stacks_too(start) -> None:
    """A script's ``program &`` ignores SIGQUIT, as its children do."""
    program = start(
        "import signal, sys; signal.signal(signal.SIGQUIT, signal.SIG_IGN)\n"
        "report.phase('x'); sys.stdin.read()"
    )
    program.until(lambda report: report["pid"] == program.process.pid)
    program.process.send_signal(signal.SIGQUIT)
    program.process.stdin.close()
    program.process.stdin = None
    assert "most recent call first" in program.end()[1]


def test_children_say_nothing(start) -> None:
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
    program.until(lambda report: report["phase"] == "over")
    assert {report["saved"] for report in program.reports()} == {1}


def test_nobody_reads(start) -> None:
    """The pipe is full, and then it is gone; the program notices neither."""
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
    # Whole lines, however full it was.
    assert all(report["kind"] == "report" for report in program.reports())
    reader, program.reader = program.reader, os.open(os.devnull, os.O_RDONLY)
    os.close(reader)
    out, err = program.process.communicate("\n", timeout=30)
    assert (out, err, program.process.returncode) == ("gone\n", "", 0)


def test_who_uses_sigquit_is_not_asked(start) -> None:
    program = start(f"""
        import signal
        signal.signal(signal.SIGQUIT, lambda *_: print("mine", flush=True))
        report.phase("training")
        {WAIT}
    """)
    program.until(lambda report: report["phase"] == "training")
    assert program.reports()[-1]["pid"] is None
    program.process.send_signal(signal.SIGQUIT)
    time.sleep(0.2)
    assert program.end() == ("mine\n", "")


def test_a_signal_handler_may_report(start) -> None:
    """Also while the code that it interrupts does."""
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


def test_the_launcher_reads_what_is_told(start, tmp_path: Path) -> None:
    from hvdtrain.agent.rank_report import RankReport, read_report

    program = start(f"""
        report.watch(lambda: "", lambda: 1.23456, lambda: 7 << 40)
        report.learned(640.0, 0.123456789)
        report.waited_for_input(1.5); report.waited_for_input(0.25)
        report.step(3, 1); report.phase('training'); report.saved(2)
        {WAIT}
    """)
    program.until(lambda report: report.get("saved") == 2)
    assert read_report(program.reports()[-1]) == RankReport(
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


def test_what_is_no_number_is_not_told_and_not_read(start) -> None:
    from hvdtrain.agent.rank_report import read_report

    program = start(f"""
        report.watch(lambda: "", lambda: float("nan") / 0, lambda: float("inf"))
        report.learned(float("inf"), float("nan"))
        report.waited_for_input(float("nan"))
        report.saved(2)
        {WAIT}
    """)
    program.until(lambda report: report.get("saved") == 2)
    nonsense = {
        "loss": float("nan"),
        "waited_s": "1",
        "input_s": True,
        "reduced_bytes": 0.5,
        "samples": 1.5,
    }
    assert not nonsense.keys() & program.reports()[-1].keys()
    for name, value in nonsense.items():
        assert read_report({"kind": "report", name: value}) is None


def test_whether_anybody_listens_is_known(start, run_command) -> None:
    program = start("print(report.is_heard())")
    assert program.end()[0] == "True\n"
    alone = "from hvdtrain.monitor import report; print(report.is_heard())"
    assert run_command([sys.executable, "-c", alone]).stdout == "False\n"


def test_a_phase_within_another(start):
    program = start(
        """
        report.phase("training")
        with report.during("checkpoint"):
            pass
        import sys; sys.stdin.read()
        """
    )
    program.until(lambda report: report["phase"] == "training")
    program.until(lambda _: len(program.reports()) >= 3)
    phases = [report["phase"] for report in program.reports()]
    assert phases == ["training", "checkpoint", "training"]
