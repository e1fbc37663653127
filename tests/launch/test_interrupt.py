"""Ctrl-C at ``hvdtrain run`` with the real mpirun: what is seen of ranks that are told to end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.jobs import StartedJob

pytestmark = pytest.mark.mpi

# Leaves a file for the test, which then interrupts.
READY = "open(os.path.join({folder!r}, str(rank)), 'w').close()"
WAIT = f"{READY}\ntime.sleep(120)"
# What the ranks do, and what they are seen to write between the start and the launcher's verdict.
INTERRUPTED: dict[str, tuple[str, list[str]]] = {
    "waits": (WAIT, []),
    "has-a-handler": (
        "import signal\n"
        "def save(number, frame): print('saved', rank); sys.exit(0)\n"
        f"signal.signal(signal.SIGINT, save)\n{WAIT}",
        ["[0] saved 0", "[1] saved 1"],
    ),
    "says-so-on-stderr": (
        "import atexit\n"
        f"atexit.register(lambda: print('bye', rank, file=sys.stderr, flush=True))\n{WAIT}",
        ["[0] bye 0", "[1] bye 1"],
    ),
    "has-workers": (
        f"import multiprocessing\npool = multiprocessing.Pool(2)\n{READY}\n"
        "pool.map(time.sleep, [120] * 4, chunksize=1)",
        [],
    ),
}


def interrupt(job: StartedJob, folder: Path, number: int = signal.SIGINT) -> list[str]:
    """What is printed to the end, once both ranks have begun."""
    job.wait_for(2, folder, timeout_s=150)
    job.process.send_signal(number)
    output, _ = job.process.communicate(timeout=30)
    assert job.process.returncode == 128 + number, output
    return output.splitlines()


@pytest.mark.parametrize(("body", "seen"), INTERRUPTED.values(), ids=INTERRUPTED)
def test_ctrl_c_is_quiet(
    start_job: Callable[..., StartedJob], tmp_path: Path, body: str, seen: list[str]
) -> None:
    job = start_job("-np", "2", body=body.format(folder=str(tmp_path)))
    *lines, last = interrupt(job, tmp_path)
    assert sorted(lines) == seen
    assert last == "hvdtrain run: the job was ended by SIGINT"


def test_an_error_of_its_own_is_seen(start_job: Callable[..., StartedJob], tmp_path: Path) -> None:
    body = f"""
    try:
        {READY.format(folder=str(tmp_path))}
        time.sleep(120)
    finally:
        if rank == 1:
            raise ValueError("disk full")
    """
    *lines, last = interrupt(start_job("-np", "2", body=body), tmp_path)
    assert lines[-1] == "[1] ValueError: disk full"
    assert {line[:3] for line in lines} == {"[1]"}
    assert last == "hvdtrain run: the job was ended by SIGINT"


def test_the_files_have_all_of_it(start_job: Callable[..., StartedJob], tmp_path: Path) -> None:
    ready, logs = tmp_path / "ready", tmp_path / "logs"
    ready.mkdir()
    body = WAIT.format(folder=str(ready))
    job = start_job("-np", "2", "--output-dir", str(logs), body=body)
    assert interrupt(job, ready) == ["hvdtrain run: the job was ended by SIGINT"]
    for rank in (0, 1):
        text = (logs / f"rank-{rank}.log").read_text()
        assert text.startswith("Traceback (most recent call last):\n")
        assert text.endswith("\nKeyboardInterrupt\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_wait_for_each_other_complain_of_nobody(
    start_job: Callable[..., StartedJob], tmp_path: Path, number: int
) -> None:
    """One dies first, and the other, which waits for it, notices."""
    body = f"""
    import numpy as np, signal, hvdtrain
    from hvdtrain import world
    hvdtrain.init()
    if rank == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    world.collectives().allreduce(np.ones(3))
    print("ready")
    {READY.format(folder=str(tmp_path))}
    while True:
        world.collectives().allreduce(np.ones(3))
    """
    *lines, last = interrupt(start_job("-np", "2", body=body), tmp_path, number)
    # TensorFlow has its say while it is loaded.
    after = lines[max(index for index, text in enumerate(lines) if text.endswith("] ready")) + 1 :]
    assert after == []
    assert last == f"hvdtrain run: the job was ended by {signal.Signals(number).name}"


# ``hvdtrain run`` that is told to stop whenever its ranks have ended.
TOLD_LATE = """
import atexit, os, signal, sys
from hvdtrain.cli import main
from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.launch.supervisor import Supervisor

def first_stop(act):
    def acting(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return act(*arguments)
    return acting

atexit.register(os.kill, os.getpid(), signal.SIGTERM)
Supervisor._end = first_stop(Supervisor._end)
JobRecorder.close = first_stop(JobRecorder.close)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("code", "phase"), [(0, "done"), (3, "own code")])
def test_a_stop_that_comes_after_the_ranks_have_ended_changes_nothing(
    start_job: Callable[..., StartedJob], tmp_path: Path, code: int, phase: str
) -> None:
    job = start_job(
        *("-np", "1", "--jobs-dir", str(tmp_path)),
        body=f"sys.exit({code})",
        command=[sys.executable, "-c", TOLD_LATE, "run"],
    )
    output, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == code, output
    (state,) = tmp_path.glob("*/state.json")
    told = json.loads(state.read_text())
    assert (told["phase"], told["code"], told["cause"]) == ("ended", code, phase)
