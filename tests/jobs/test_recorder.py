from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.agent import backlog
from hvdtrain.jobs import recorder as module
from hvdtrain.jobs.files import read_json_lines
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.log import read_log
from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.jobs.state import own_identity
from hvdtrain.launch.observer import (
    AttemptBegan,
    AttemptEnded,
    CheckpointSaved,
    JobEnded,
    Progress,
    RankLost,
    RankTable,
    Restarting,
    Summary,
)


def _until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lines(job: JobFolder) -> list[str]:
    return [f"{one.line.rank} {one.line.text}" for one in read_log(job.log) if one.line]


def test_what_is_told_is_in_the_folder_soon(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    with contextlib.closing(JobRecorder(job)) as recorder:
        recorder.state(phase="running", attempt=1, ranks=2)
        recorder.line(1, "stdout", "hello")
        recorder.notice("all is\nwell")
        recorder.event("began", attempt=1)
        recorder.metrics(step=3)
        _until(lambda: job.state() is not None)
        state = job.state()
        assert state is not None
        assert (state.launcher, state.ranks) == (own_identity(), 2)
        assert _lines(job) == ["1 hello", "-1 all is", "-1 well"]
        [event] = read_json_lines(job.events)
        assert (event["kind"], event["attempt"]) == ("began", 1)
        assert abs(event["time"] - time.time()) < 60
        assert [row["step"] for row in read_json_lines(job.metrics)] == [3]
        recorder.line(0, "stderr", "the last")
        recorder.state(phase="ended", code=0)
    state = job.state()
    assert state is not None
    assert (state.phase, state.code, state.attempt) == ("ended", 0, 1)
    assert _lines(job)[-1] == "0 the last"


def test_metrics_are_rolled_up_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobFolder(tmp_path)
    begin_s = 1_800_000_000.0
    with contextlib.closing(JobRecorder(job)) as recorder:
        for second in range(125):
            monkeypatch.setattr(time, "time", lambda second=second: begin_s + second)
            recorder.metrics(step=second, own_s=0.1 + second / 1000)
            if second == 70:
                _until(lambda: len(list(read_json_lines(job.roll_ups[10]))) == 7)
    assert len(list(read_json_lines(job.metrics))) == 125
    tens, minutes = (list(read_json_lines(job.roll_ups[span_s])) for span_s in (10, 60))
    # What had begun at the end is there, too.
    assert [row["time"] - begin_s for row in tens] == [4.5 + 10 * n for n in range(12)] + [122.0]
    assert [row["time"] - begin_s for row in minutes] == [29.5, 89.5, 122.0]
    assert (minutes[1]["own_s_min"], minutes[1]["own_s_max"]) == (0.16, 0.219)


def test_events_of_the_launcher_become_rows_and_state(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    began = AttemptBegan(ranks=2, hosts={"a": 2}, mpi="Open MPI 5.0.7")
    ended = AttemptEnded(code=1, cause="exception", step=7, saved=5, lost_s=1.5, words="no data")
    for _ in range(2):
        with contextlib.closing(JobRecorder(job)) as recorder:
            recorder.on_event(began)
            recorder.on_event(Progress(step=7, epoch=0, total_steps=9))
            recorder.on_event(
                Progress(
                    step=8,
                    epoch=0,
                    total_steps=9,
                    own_s=[0.2, 0.5],
                    slow=(1, 2.5, "a"),
                    held_by=[1],
                )
            )
            recorder.on_event(CheckpointSaved(step=5))
            recorder.on_event(RankTable(columns={"step": [8, None]}))
            recorder.on_event(RankLost(rank=1, host="a", step=8, words="lost"))
            recorder.on_event(ended)
            recorder.on_event(Restarting())
            recorder.on_event(Summary(shares={"kept": 2 / 3}))
            recorder.on_event(JobEnded(code=1, cause="exception", verdict="no data"))
    events = [{**row, "time": 0} for row in read_json_lines(job.events)]
    assert [row["kind"] for row in events] == 2 * [
        *("began", "checkpoint", "loss", "ended", "summary")
    ]
    # A job that is started again goes on counting.
    assert [row["attempt"] for row in events if "attempt" in row] == [1, 1, 2, 2]
    assert events[3] == {"kind": "ended", "time": 0, "attempt": 1, **dataclasses.asdict(ended)}
    first, second = list(read_json_lines(job.metrics))[:2]
    assert {**first, "time": 0} == {"time": 0, "step": 7, "epoch": 0}
    assert [second[name] for name in ("own_s_max", "slow", "slow_factor", "slow_host")] == [
        *(0.5, 1, 2.5, "a")
    ]
    assert second["held_by"] == [1]
    assert [row["step"] for row in read_json_lines(job.ranks)] == 2 * [[8, None]]
    state = job.state()
    assert state is not None
    assert (state.phase, state.attempt, state.ranks, state.hosts) == ("ended", 2, 2, {"a": 2})
    assert (state.step, state.total_steps, state.saved) == (8, 9, 5)
    assert (state.code, state.cause, state.verdict) == (1, "exception", "no data")


def test_a_full_disk_delays_what_is_told_and_loses_none_of_it(small_disk: Path) -> None:
    job = JobFolder(small_disk)
    ballast = small_disk / "ballast"
    with contextlib.closing(JobRecorder(job)) as recorder:
        recorder.state(phase="running")
        recorder.line(0, "stdout", "first")
        _until(job.state)
        ballast.write_bytes(b"")
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        for number in range(2000):
            recorder.line(0, "stdout", f"{number} " + "y" * 100)
        recorder.event("loss", rank=1)
        recorder.state(phase="ended", code=1, verdict="z" * 5000)
        time.sleep(3 * module.INTERVAL_S)
        state = job.state()
        assert state is not None
        assert state.phase == "running", "the disk was not full"
        ballast.unlink()
    state = job.state()
    assert state is not None
    assert state.phase == "ended"
    assert [line.split()[1] for line in _lines(job)] == ["first", *map(str, range(2000))]
    assert [event["kind"] for event in read_json_lines(job.events)] == ["loss"]


def test_what_is_lost_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before the end here, and more comes than may wait."""
    monkeypatch.setattr(backlog, "MOST_BYTES", 5 * (1 + backlog.ITEM_BYTES))
    monkeypatch.setattr(module, "INTERVAL_S", 60.0)
    job = JobFolder(tmp_path)
    with contextlib.closing(JobRecorder(job)) as recorder:
        for number in range(8):
            recorder.line(0, "stdout", str(number))
    assert _lines(job) == [
        "-1 3 lines could not be written into this log",
        *(f"0 {number}" for number in range(3, 8)),
    ]


def test_a_folder_that_is_removed_disturbs_nobody(tmp_path: Path) -> None:
    job = JobFolder(tmp_path / "job")
    with contextlib.closing(JobRecorder(job)) as recorder:
        recorder.state(phase="running")
        recorder.line(0, "stdout", "a")
        time.sleep(2 * module.INTERVAL_S)
        recorder.line(0, "stdout", "b")
    assert not job.path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_word_to_stop_reaches_the_launcher_as_a_signal(number: int, tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(number, lambda number, frame: received.append(number))
    try:
        job = JobFolder(tmp_path)
        with contextlib.closing(JobRecorder(job)):
            job.request_stop(number)
            _until(lambda: received)
        assert received == [number]
    finally:
        signal.signal(number, before)
