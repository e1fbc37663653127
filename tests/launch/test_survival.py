"""Restarts, preemptions, hangs and elastic jobs of ``hvdtrain run`` with the real mpirun."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.jobs import REPOSITORY, YIELDING
from tests.launch.jobs import HVDTRAIN, with_mark

SUMMARY = re.compile(
    r"^hvdtrain run: (?:\d+ steps in |time: |ranks waited |the time that ranks waited ).*\n",
    re.MULTILINE,
)
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
RAISE = "raise ValueError('no such batch')"
QUICK = ("--grace-s", "1")


class Training:
    """The stand-in under ``hvdtrain run``."""

    def __init__(self, folder: Path, *options: str, program: tuple[str, ...] = ()) -> None:
        self.folder = folder
        standin = ["-m", "tests.launch.standin", str(folder), *program]
        environ = {**with_mark(uuid.uuid4().hex), **YIELDING}
        self.process = subprocess.Popen(
            [*HVDTRAIN, *options, "--", sys.executable, *standin],
            env=environ,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def steps(self) -> list[tuple[int, int, int]]:
        """Return the attempt, size and number of each step that the chief has completed."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]  # type: ignore[misc]

    def after_steps(self, count: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.steps()) < count:
            over = time.monotonic() > deadline or self.process.poll() is not None
            assert not over, self.end()
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Wait until the job ends, and return its exit code and its output without the summary."""
        output, _ = self.process.communicate(timeout=120)
        output = SUMMARY.sub("", output)
        return self.process.returncode, output


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def start(*options: str, program: tuple[str, ...] = (), name: str = "") -> Training:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        started.append(Training(folder, *options, program=program))
        return started[-1]

    yield start
    for training in started:
        training.process.kill()
        training.process.communicate(timeout=20)


def messages(output: str) -> list[str]:
    """Return the launcher's messages."""
    return re.findall(r"^hvdtrain run: (.*)$", output, re.MULTILINE)


def test_a_killed_rank_restarts_from_the_checkpoint(train, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = ("-np", "2", "--max-restarts", "3", "--output-dir", str(logs), *QUICK)
    training = train(
        *options, program=("--fault", "1", "13", f"print('dying', flush=True); {KILL}")
    )
    code, output = training.end()
    assert code == 0, output
    steps = training.steps()
    assert [(attempt, step) for attempt, _, step in steps] == [
        *[(1, step) for step in range(1, 13)],
        *[(2, step) for step in range(11, 21)],
    ]
    assert re.search(
        r"attempt 2 of 4 starts now on localhost \(2 ranks\); "
        r"lost: \d steps?, \d+ s, since the checkpoint of step 10$",
        output,
        re.MULTILINE,
    ), output
    assert re.fullmatch(r"2 attempts; lost in total: \d steps?, \d+ s", messages(output)[-1])
    assert "dying" in (logs / "rank-1.log").read_text(), "the second attempt appends"


def test_an_exception_that_repeats_ends_the_job(train) -> None:
    program = ("--always", "--fault", "0", "13", RAISE)
    code, output = train("-np", "2", "--max-restarts", "5", *QUICK, program=program).end()
    assert code == 1, output
    assert output.count("starts now") == 1, output
    assert messages(output)[-3] == (
        "the job is not restarted: the program raised an exception after step 12 again"
    )
    assert (
        messages(output)[-1]
        == "the newest checkpoint is from step 10; start the job again to resume"
    )


def test_a_signal_ends_the_pause_before_a_restart(train) -> None:
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}
    options = ("-np", "2", "--max-restarts", "20", *QUICK)
    program = ("--always", "--fault", "1", "1", KILL)
    jobs = {number: train(*options, program=program, name=number.name) for number in codes}
    for number, training in jobs.items():
        lines = iter(training.process.stdout)
        assert any(re.search(r"attempt \d+ of 21 starts in [1-9]\d* s", line) for line in lines)
        time.sleep(0.2)
        training.process.send_signal(number)
        assert training.end()[0] == codes[number], number


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_preemption_signal(train, number: int) -> None:
    training = train("-np", "3", program=("--steps", "5000", "--every", "10000"))
    training.after_steps(5)
    training.process.send_signal(number)
    code, output = training.end()
    assert code == 75, output
    (line,) = messages(output)
    _, _, last = training.steps()[-1]
    name = signal.Signals(number).name
    assert line == (
        f"the job was stopped by {name} at step {last}, checkpoint saved; start the job again to "
        "resume"
    )
    training = train("-np", "2", program=("--steps", str(last + 5)))
    assert training.end()[0] == 0
    assert [step for _, _, step in training.steps()] == list(range(1, last + 6))


def test_a_preemption_signal_to_one_rank(train) -> None:
    send = "os.kill(os.getpid(), signal.SIGUSR1)"
    training = train("-np", "3", "--max-restarts", "1", program=("--fault", "2", "7", send))
    code, output = training.end()
    # hvdtrain run was not signalled, so it restarts the job, which does not count.
    assert code == 0, output
    assert messages(output)[0].startswith("preempted at step 7, checkpoint saved")
    assert "attempt 2 of 3 starts" in messages(output)[1]
    assert [step for _, _, step in training.steps()] == list(range(1, 21))


@pytest.mark.parametrize(("grace_s", "saves"), [("60", True), ("1", False)])
def test_the_grace_before_a_preemption(train, tmp_path: Path, grace_s: str, saves: bool) -> None:
    """A rank may need longer than the other ranks, up to the grace period."""
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    ready.mkdir()
    # The ranks don't wait in MPI, where Python's signal handlers don't run.
    waits = f"open({str(ready)!r} + f'/{{os.getpid()}}', 'w').close(); time.sleep(100)"
    saves_slowly = (
        f"(time.sleep({2 if saves else 100}), open({str(saved)!r}, 'w').close(), os._exit(75))"
    )
    program = ("--steps", "5000")
    for rank, action in (("0", saves_slowly), ("1", "os._exit(75)")):
        handler = f"signal.signal(signal.SIGUSR1, lambda *_: {action})"
        program += ("--fault", rank, "3", f"{handler}; {waits}")
    training = train("-np", "2", "--preempt-grace-s", grace_s, program=program)
    training.after_steps(2)
    while len(list(ready.iterdir())) < 2:
        time.sleep(0.02)
    training.process.send_signal(signal.SIGUSR1)
    code, output = training.end()
    assert (code, saved.exists()) == (75, saves), output


def test_a_rank_may_save_after_the_others_have_exited(train, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    slow = f"time.sleep(2); open({str(saved)!r}, 'w').close(); os._exit(75)"
    program = ("--fault", "0", "3", slow, "--fault", "1", "3", "os._exit(75)")
    code, output = train("-np", "2", "--grace-s", "0", program=program).end()
    assert (code, saved.exists()) == (75, True), output


def test_child_processes_get_no_preemption_signal(train) -> None:
    """Child processes are needed until the checkpoint is saved, and the signal would kill them."""
    worker = "worker = subprocess.Popen(['sleep', '100'])"
    check = "os.write(2, str(worker.poll()).encode() + b'\\n')"
    fault = f"import subprocess, atexit; {worker}; atexit.register(lambda: {check})"
    training = train("-np", "2", program=("--steps", "5000", "--fault", "1", "3", fault))
    training.after_steps(5)
    training.process.send_signal(signal.SIGUSR1)
    code, output = training.end()
    assert code == 75, output
    assert "[1] None\n" in output


HANGS: dict[str, tuple[str, str, str]] = {
    "stopped": (STOP, "stopped (state T)", "in agree"),
    "stuck": ("time.sleep(1000)", "not waiting for other ranks", "in inject_fault"),
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_ends_or_restarts_the_job(train, hang: str) -> None:
    fault, why, where = HANGS[hang]
    options = ("-np", "3", "--hang-timeout-s", "3", "--chief-only", *QUICK)
    if hang == "stopped":
        options += ("--max-restarts", "1")
    training = train(*options, program=("--fault", "1", "13", fault))
    code, output = training.end()
    lines = messages(output)
    assert re.fullmatch(
        r"the job hangs: no rank has completed a step for \d+ s after step 12", lines[0]
    )
    assert re.fullmatch(r"rank 1 on \S+ has not arrived: " + re.escape(why), lines[1]), output
    assert lines[2] == "ranks 0, 2 wait in step 13: allreduce(gradients)"
    stacks = dict.fromkeys(re.findall(r"^\[(\d)\] +File .* in agree$", output, re.MULTILINE))
    assert set(stacks) == {"0", "2"}, "not only of the chief"
    assert where in output
    if hang == "stopped":
        assert (code, training.steps()[-1]) == (0, (2, 3, 20)), output
    else:
        end = "the newest checkpoint is from step 10; start the job again to resume"
        assert (code, lines[3:]) == (124, [end]), output


def test_a_long_validation_and_a_long_first_step_are_not_hangs(train) -> None:
    long = "from hvdtrain.monitor import report; report.phase('validation'); time.sleep(8); "
    faults = {
        "validation": ("13", long + "report.phase('training')"),
        "first step": ("1", "time.sleep(7)"),
    }
    jobs = [
        train("-np", "2", "--hang-timeout-s", "3", program=("--fault", "1", *fault), name=name)
        for name, fault in faults.items()
    ]
    for training in jobs:
        assert training.end() == (0, "")


ELASTIC = ("-np", "3", "--elastic", *QUICK)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("fault", [KILL, "import ctypes; ctypes.string_at(0)"])
def test_remaining_ranks_continue_after_a_loss(train, rank: int, fault: str) -> None:
    program = ("--elastic", "--steps", "40", "--fault", str(rank), "13", fault)
    code, output = train(*ELASTIC, "--min-np", "2", program=program).end()
    assert code == 0, output
    name = "SIGKILL" if fault == KILL else "SIGSEGV"
    (line,) = messages(output)
    assert re.fullmatch(
        rf"rank {rank} on \S+ was lost \({name}\)( after step \d+)?; 2 ranks continue", line
    ), output


def test_a_failure_after_a_loss(train) -> None:
    program = ("--elastic", "--fault", "1", "13", KILL, "--fault", "2", "18", RAISE)
    code, output = train(*ELASTIC, program=program).end()
    assert code == 1, output
    assert "2 ranks continue" in messages(output)[0]
    assert re.match(r"rank 2 on \S+ failed first: exit code 1", messages(output)[1])
    assert "[2] ValueError: no such batch" in output
