"""Jobs while the reader of the output pauses, or while ``hvdtrain run`` is suspended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch.jobs import StartedJob

pytestmark = pytest.mark.mpi

# Longer than TCP's time-outs, after which the other host counts as lost.
PAUSE_S = 9.0
LINES = 20_000
BODY = f"""
for number in range({LINES}):
    print(number, 'x' * 1000)
print('the end', file=sys.stderr)
open(os.path.join({{folder!r}}, str(rank)), 'w').close()
"""


def shown_lines(output: str, rank: int) -> list[str]:
    """Return the numbers of a rank's lines, and its last line."""
    mark = f"[{rank}] "
    lines = [line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark)]
    return [line if line == "the end" else line.partition(" ")[0] for line in lines]


def test_a_paused_reader_and_a_suspended_launcher(
    start_job: Callable[..., StartedJob], tmp_path: Path
) -> None:
    """Both at the same time, because they mostly wait."""
    with ThreadPoolExecutor() as pool:
        checks = []
        for check in (_pause_the_reader, _suspend_the_launcher):
            folder = tmp_path / check.__name__
            folder.mkdir()
            checks.append(pool.submit(check, start_job, folder))
    for check in checks:
        check.result()


def _pause_the_reader(start_job: Callable[..., StartedJob], tmp_path: Path) -> None:
    logs, ready = tmp_path / "logs", tmp_path / "ready"
    ready.mkdir()
    job = start_job("-np", "2", "--output-dir", str(logs), body=BODY.format(folder=str(ready)))
    job.wait_for(2, ready, timeout_s=100)
    time.sleep(PAUSE_S)
    output, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == 0, output[-2000:]
    everything = [*map(str, range(LINES)), "the end"]
    [gap] = [line for line in output.splitlines() if line.startswith("hvdtrain run: ")]
    dropped = 0
    for rank in (0, 1):
        shown = shown_lines(output, rank)
        assert shown[-1000:] == everything[-1000:]
        dropped += len(everything) - len(shown)
        kept = (logs / f"rank-{rank}.log").read_text().splitlines()
        assert [line.partition(" x")[0] for line in kept] == everything
    assert gap.startswith(f"hvdtrain run: {dropped} lines skipped")


def _suspend_the_launcher(start_job: Callable[..., StartedJob], tmp_path: Path) -> None:
    """Ranks block in their prints, and no line is lost."""
    wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
    ready = f"open(os.path.join({str(tmp_path)!r}, f'ready {{rank}}'), 'w').close()"
    job = start_job("-np", "2", body=f"{ready}\n{wait}\n{BODY.format(folder=str(tmp_path))}")
    job.wait_for(2, tmp_path, timeout_s=100)
    os.kill(job.process.pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    time.sleep(PAUSE_S)
    assert len(os.listdir(tmp_path)) == 3, "the ranks block"
    os.kill(job.process.pid, signal.SIGCONT)
    output, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == 0, output[-2000:]
    for rank in (0, 1):
        assert shown_lines(output, rank) == [*map(str, range(LINES)), "the end"]


def test_a_launcher_suspended_while_ranks_start(start_job: Callable[..., StartedJob]) -> None:
    job = start_job("-np", "2", "--start-timeout-s", "8", body="print('fine')")
    deadline = time.monotonic() + 60
    while len(job.left()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(job.process.pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(job.process.pid, signal.SIGCONT)
    output, _ = job.process.communicate(timeout=60)
    assert (job.process.returncode, sorted(output.splitlines())) == (0, ["[0] fine", "[1] fine"])
