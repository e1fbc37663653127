"""What the launcher makes of the ranks' reports."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hvdtrain.agent.messages import encode
from hvdtrain.agent.rank_report import FailureRecord, RankReport, read_failure, read_report
from hvdtrain.agent.report_pipe import ReportPipe
from hvdtrain.config import REPORT_FD
from hvdtrain.launch.job_progress import JobProgress


def test_a_report_is_read() -> None:
    message = {"kind": "report", "pid": 7, "step": 3, "epoch": 0, "phase": "training"}
    assert read_report(message) == RankReport(pid=7, step=3, epoch=0, phase="training")
    assert read_report({"kind": "report"}) == RankReport()


NONSENSE: dict[str, dict[str, Any]] = {
    "a word for a step": {"step": "3"},
    "half a step": {"step": 3.5},
    "true": {"saved": True},
    "a list": {"epoch": [1]},
    "a phase that is a number": {"phase": 3},
    "no operation": {"waiting_in": None},
}


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_no_report(message: dict[str, Any]) -> None:
    assert read_report(message) is None


def test_words_can_be_shown() -> None:
    report = read_report({"phase": "a\nb\x1b[2J", "waiting_in": "x" * 5000})
    assert report is not None
    assert report.phase == "a?b?[2J"
    assert len(report.waiting_in) == 500


FAILURE = {"exception": "KeyError", "message": "'x'", "traceback": "a\nb\x1b[2J", "time_s": 5.0}


def test_a_failure_is_read() -> None:
    expected = FailureRecord(exception="KeyError", message="'x'", traceback="a\nb?[2J", time_s=5.0)
    assert read_failure({"kind": "failure", **FAILURE}) == expected


@pytest.mark.parametrize("name", FAILURE)
def test_nonsense_is_no_failure(name: str) -> None:
    assert read_failure({**FAILURE, name: 7}) is None
    assert read_failure({other: FAILURE[other] for other in FAILURE if other != name}) is None


KINDS = {
    "PeerFailedError": "follows",
    "CollectiveTimeoutError": "hang",
    "KeyboardInterrupt": "interrupt",
    "SystemExit": "interrupt",
    "KeyError": "exception",
}


@pytest.mark.parametrize("exception", KINDS)
def test_whose_fault_a_failure_is(exception: str) -> None:
    assert FailureRecord(exception=exception).kind == KINDS[exception]


def test_what_is_known_of_all_ranks() -> None:
    reports = JobProgress()
    assert (reports.step, reports.saved, reports.moved_at, reports.stepped) == (None,) * 3 + (
        False,
    )
    reports.note(0, RankReport(resumed=10), 1.0)
    assert (reports.step, reports.saved, reports.stepped) == (None, 10, False)
    reports.note(1, RankReport(resumed=10, step=11), 2.0)
    assert (reports.step, reports.saved, reports.stepped) == (11, 10, True)
    assert (reports.moved_at, reports.saved_at) == (2.0, None)
    reports.note(0, RankReport(resumed=10, step=11, saved=11), 3.0)
    assert (reports.step, reports.saved, reports.saved_at) == (11, 11, 3.0)
    reports.note(1, RankReport(resumed=10, step=11, waiting_in="barrier"), 4.0)
    assert reports.moved_at == 3.0, "waiting is no movement"
    reports.note(1, RankReport(resumed=10, step=11, phase="validation"), 5.0)
    assert reports.moved_at == 5.0


def write(pipe: ReportPipe, data: bytes) -> None:
    number, inode = map(int, pipe.variables[REPORT_FD].split(":"))
    assert os.fstat(number).st_ino == inode
    os.write(number, data)


def test_the_pipe_carries_reports_and_failures_alone() -> None:
    pipe = ReportPipe()
    assert pipe.read() == []
    data = encode("report", step=1, pid=5, self=1) + encode("end", code=0) + b'{"kind":"rep'
    write(pipe, data)
    assert pipe.read() == [{"kind": "report", "step": 1, "pid": 5}]
    assert pipe.pid == 5
    write(pipe, b'ort","step":2}\n' + encode("failure", exception="KeyError", rank=3))
    assert pipe.read() == [
        {"kind": "report", "step": 2},
        {"kind": "failure", "exception": "KeyError"},
    ]
    pipe.handed_over()
    assert pipe.read() is None


@pytest.mark.parametrize("garbage", [b"hello\n", b"[]\n", b"x" * 60_000 + b"\n"])
def test_garbage_in_the_pipe_ends_it(garbage: bytes) -> None:
    pipe = ReportPipe()
    write(pipe, garbage)
    assert pipe.read() is None
    pipe.handed_over()
