from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.agent import backlog
from hvdtrain.jobs import recorder as module
from hvdtrain.jobs.files import read_json_lines
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.log import read_log
from hvdtrain.jobs.recorder import JobRecorder, RollUp, spread
from hvdtrain.jobs.state import JobState, own_identity
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


def _wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lines(job: JobFolder) -> list[str]:
    return [f"{one.line.rank} {one.line.text}" for one in read_log(job.log) if one.line]


def _state(job: JobFolder) -> JobState:
    state = job.read_state()
    assert state is not None
    return state


def test_all_records_are_written_soon(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    with contextlib.closing(JobRecorder(job)) as recorder:
        recorder.update_state(phase="running", attempt=1, ranks=2)
        recorder.line(1, "stdout", "hello")
        recorder.notice("all is\nwell")
        recorder.record_event("began", attempt=1)
        recorder.record_metrics(step=3)
        _wait_until(lambda: job.read_state() is not None)
        assert (_state(job).launcher, _state(job).ranks) == (own_identity(), 2)
        assert _lines(job) == ["1 hello", "-1 all is", "-1 well"]
        [event] = read_json_lines(job.events)
        assert (event["kind"], event["attempt"]) == ("began", 1)
        assert abs(event["time"] - time.time()) < 60
        assert [row["step"] for row in read_json_lines(job.metrics)] == [3]
        recorder.line(0, "stderr", "the last")
        recorder.update_state(phase="ended", code=0)
    state = _state(job)
    assert (state.phase, state.code, state.attempt) == ("ended", 0, 1)
    assert _lines(job)[-1] == "0 the last"


def test_metrics_are_rolled_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobFolder(tmp_path)
    begin_s = 1_800_000_000.0
    with contextlib.closing(JobRecorder(job)) as recorder:
        for second in range(125):
            monkeypatch.setattr(time, "time", lambda second=second: begin_s + second)
            recorder.record_metrics(step=second, own_s=0.1 + second / 1000)
            if second == 70:
                _wait_until(lambda: len(list(read_json_lines(job.roll_ups[10]))) == 7)
    assert len(list(read_json_lines(job.metrics))) == 125
    tens, minutes = (list(read_json_lines(job.roll_ups[span_s])) for span_s in (10, 60))
    # The last interval is incomplete.
    assert [row["time"] - begin_s for row in tens] == [4.5 + 10 * n for n in range(12)] + [122.0]
    assert [row["time"] - begin_s for row in minutes] == [29.5, 89.5, 122.0]
    assert (minutes[1]["own_s_min"], minutes[1]["own_s_max"]) == (0.16, 0.219)


def test_events_become_rows_and_state(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    ended = AttemptEnded(code=1, cause="exception", step=7, saved=5, lost_s=1.5, words="no data")
    progress = Progress(step=7, epoch=0, total_steps=9)
    slow = dataclasses.replace(progress, step=8, own_s=[0.2, 0.5], slow=(1, 2.5, "a"), held_by=[1])
    for _ in range(2):
        with contextlib.closing(JobRecorder(job)) as recorder:
            for event in (
                AttemptBegan(ranks=2, hosts={"a": 2}, mpi="Open MPI 5.0.7"),
                progress,
                slow,
                CheckpointSaved(step=5),
                RankTable(columns={"step": [8, None]}),
                RankLost(rank=1, host="a", step=8, words="lost"),
                ended,
                Restarting(),
                Summary(shares={"kept": 2 / 3}),
                JobEnded(code=1, cause="exception", verdict="no data"),
            ):
                recorder.on_event(event)
    events = [{**row, "time": 0} for row in read_json_lines(job.events)]
    kinds = ["began", "checkpoint", "loss", "ended", "summary"]
    assert [row["kind"] for row in events] == 2 * kinds
    # A restarted job continues to count its attempts.
    assert [row["attempt"] for row in events if "attempt" in row] == [1, 1, 2, 2]
    assert events[3] == {"kind": "ended", "time": 0, "attempt": 1, **dataclasses.asdict(ended)}
    first, second = list(read_json_lines(job.metrics))[:2]
    assert {**first, "time": 0} == {"time": 0, "step": 7, "epoch": 0}
    names = ("own_s_max", "slow", "slow_factor", "slow_host", "held_by")
    assert [second[name] for name in names] == [0.5, 1, 2.5, "a", [1]]
    assert [row["step"] for row in read_json_lines(job.ranks)] == 2 * [[8, None]]
    state = _state(job)
    assert (state.phase, state.attempt, state.ranks, state.hosts) == ("ended", 2, 2, {"a": 2})
    assert (state.step, state.total_steps, state.saved) == (8, 9, 5)
    assert (state.code, state.cause, state.verdict) == (1, "exception", "no data")


def test_a_full_disk_delays_records_without_losing_them(small_disk: Path) -> None:
    job = JobFolder(small_disk)
    ballast = small_disk / "ballast"
    with contextlib.closing(JobRecorder(job)) as recorder:
        recorder.update_state(phase="running")
        recorder.line(0, "stdout", "first")
        _wait_until(job.read_state)
        ballast.write_bytes(b"")
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        for number in range(2000):
            recorder.line(0, "stdout", f"{number} " + "y" * 100)
        recorder.record_event("loss", rank=1)
        recorder.update_state(phase="ended", code=1, verdict="z" * 5000)
        time.sleep(3 * module.INTERVAL_S)
        assert _state(job).phase == "running", "the disk was not full"
        ballast.unlink()
    assert _state(job).phase == "ended"
    assert [line.split()[1] for line in _lines(job)] == ["first", *map(str, range(2000))]
    assert [event["kind"] for event in read_json_lines(job.events)] == ["loss"]


def test_lost_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is written before the end, and the backlog overflows.
    monkeypatch.setattr(backlog, "MAX_BYTES", 5 * (1 + backlog.ITEM_BYTES))
    monkeypatch.setattr(module, "INTERVAL_S", 60.0)
    job = JobFolder(tmp_path)
    with contextlib.closing(JobRecorder(job)) as recorder:
        for number in range(8):
            recorder.line(0, "stdout", str(number))
    assert _lines(job) == [
        "-1 3 lines could not be written to this log",
        *(f"0 {number}" for number in range(3, 8)),
    ]


def test_a_removed_folder_is_ignored(tmp_path: Path) -> None:
    job = JobFolder(tmp_path / "job")
    with contextlib.closing(JobRecorder(job)) as recorder:
        recorder.update_state(phase="running")
        recorder.line(0, "stdout", "a")
        time.sleep(2 * module.INTERVAL_S)
        recorder.line(0, "stdout", "b")
    assert not job.path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_request_becomes_a_signal(number: int, tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(number, lambda number, frame: received.append(number))
    try:
        job = JobFolder(tmp_path)
        with contextlib.closing(JobRecorder(job)):
            job.request_stop(number)
            _wait_until(lambda: received)
        assert received == [number]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3, 3, 3, 3)),
        ([2.0, 1.0], (1, 1.5, 2, 2)),
        (range(19, 0, -1), (1, 10, 19, 19)),
        (range(100), (0, 49.5, 94, 99)),
        (range(1000), (0, 499.5, 949, 999)),
    ],
)
def test_spread(values: Any, expected: tuple[float, ...]) -> None:
    parts = ("x_min", "x", "x_p95", "x_max")
    assert spread("x", [{"x": value} for value in values]) == dict(zip(parts, expected))


def _rolled(*rows: dict[str, Any]) -> dict[str, Any]:
    roll_up = RollUp(60.0)
    for row in rows:
        assert roll_up.add(row) is None
    rolled = roll_up.end()
    assert rolled is not None
    return rolled


def test_a_roll_up_summarizes_an_interval() -> None:
    rows = [
        {"time": 60.0 + second, "step": 7 * second, "loss": 1 / (1 + second), "epoch": second // 30}
        for second in range(60)
    ]
    assert _rolled(*rows) == {
        "time": 89.5,
        "step": 7 * 29,
        "epoch": 0,
        "loss_min": pytest.approx(1 / 60, rel=1e-5),
        "loss": pytest.approx((1 / 30 + 1 / 31) / 2, rel=1e-5),
        "loss_p95": pytest.approx(1 / 4, rel=1e-5),
        "loss_max": 1.0,
    }


def test_a_roll_up_keeps_extremes_of_the_ranks() -> None:
    first = {"time": 1.0, **spread("own_s", [{"own_s": s} for s in (0.1, 0.2, 0.9)])}
    second = {"time": 2.0, **spread("own_s", [{"own_s": s} for s in (0.05, 0.3, 0.4)])}
    rolled = _rolled(first, second, {"time": 3.0, "own_s": 0.25})
    parts = [rolled[f"own_s{part}"] for part in ("_min", "", "_p95", "_max")]
    assert parts == [0.05, 0.25, 0.9, 0.9]


def test_a_roll_up_has_the_current_slow_rank() -> None:
    slow = {"slow": 3, "slow_host": "node1", "slow_factor": 2.0}
    assert _rolled({"time": 1.0, "slow": 1}, {"time": 2.0, **slow}) == {"time": 1.5, **slow}
    assert _rolled({"time": 1.0, **slow}, {"time": 2.0, "step": 3}) == {"time": 1.5, "step": 3}


def test_an_interval_ends_with_the_first_row_outside_it() -> None:
    roll_up = RollUp(10.0)
    assert roll_up.end() is None
    assert roll_up.add({"time": 8.0, "step": 1}) is None
    assert roll_up.add({"time": 9.9, "step": 2}) is None
    assert roll_up.add({"time": 10.0, "step": 3}) == {"time": 8.95, "step": 1}
    # After a long gap, the clock is set back.
    assert roll_up.add({"time": 95.0, "step": 4}) == {"time": 10.0, "step": 3}
    assert roll_up.add({"time": 5.0, "step": 5}) == {"time": 95.0, "step": 4}
    assert roll_up.end() == {"time": 5.0, "step": 5}
    assert roll_up.end() is None
