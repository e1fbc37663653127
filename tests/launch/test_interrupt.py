"""Interrupts (Ctrl-C) of ``hvdtrain run`` with the real mpirun."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.jobs import COLLAPSING, StartedJob

pytestmark = pytest.mark.mpi

# Creates a file; the test interrupts after it.
READY = "open(os.path.join({folder!r}, str(rank)), 'w').close()"


def interrupt(job: StartedJob, folder: Path, number: int = signal.SIGINT) -> list[str]:
    """Interrupt the job once both ranks have started, and return its output."""
    job.wait_for(2, folder, timeout_s=150)
    job.process.send_signal(number)
    output, _ = job.process.communicate(timeout=30)
    assert job.process.returncode == 128 + number, output
    return output.splitlines()


def test_ctrl_c_lets_programs_clean_up(
    start_job: Callable[..., StartedJob], tmp_path: Path
) -> None:
    """The programs' output is shown, equal lines only once. The launcher's message is last."""
    body = f"""
    import atexit, multiprocessing
    pool = multiprocessing.Pool(2)
    atexit.register(lambda: print('bye', rank, file=sys.stderr, flush=True))
    try:
        {READY.format(folder=str(tmp_path))}
        pool.map(time.sleep, [120] * 4, chunksize=1)
    finally:
        print("saved")
    """
    *lines, last = interrupt(start_job("-np", "2", body=body, command=COLLAPSING), tmp_path)
    assert {"[0] bye 0", "[1] bye 1"} <= set(lines)
    saved = [line for line in lines if line.endswith("] saved")]
    assert saved in (["[0,1] saved"], ["[0] saved", "[1] saved"], ["[1] saved", "[0] saved"])
    assert last == "hvdtrain run: the job was stopped by SIGINT"


def test_ranks_in_a_collective_stop_in_time(
    start_job: Callable[..., StartedJob], tmp_path: Path, forked_python: list[str]
) -> None:
    """The rank that waits for the other rank must not be reported as failed."""
    body = f"""
    import numpy as np, signal, hvdtrain
    from hvdtrain import world
    hvdtrain.init()
    if rank == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    world.collectives().allreduce(np.ones(3))
    {READY.format(folder=str(tmp_path))}
    while True:
        world.collectives().allreduce(np.ones(3))
    """
    job = start_job("-np", "2", body=body, python=forked_python)
    *lines, last = interrupt(job, tmp_path)
    assert not [line for line in lines if "failed first" in line]
    assert last == "hvdtrain run: the job was stopped by SIGINT"


# Sends SIGTERM to ``hvdtrain run`` several times after its ranks have ended.
LATE_SIGNALS = """
import atexit, os, signal, sys
from hvdtrain.cli import main
from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.launch.supervisor import Supervisor

def signal_before(function):
    def wrapped(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)
    return wrapped

atexit.register(os.kill, os.getpid(), signal.SIGTERM)
Supervisor._end = signal_before(Supervisor._end)
JobRecorder.close = signal_before(JobRecorder.close)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("code", "phase"), [(0, "done"), (3, "own code")])
def test_a_signal_after_the_ranks_have_ended_changes_nothing(
    start_job: Callable[..., StartedJob], tmp_path: Path, code: int, phase: str
) -> None:
    job = start_job(
        *("-np", "1", "--jobs-dir", str(tmp_path)),
        body=f"sys.exit({code})",
        command=[sys.executable, "-c", LATE_SIGNALS, "run"],
    )
    output, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == code, output
    (state,) = tmp_path.glob("*/state.json")
    saved = json.loads(state.read_text())
    assert (saved["phase"], saved["code"], saved["cause"]) == ("ended", code, phase)
