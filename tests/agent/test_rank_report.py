"""Reports and failures that a program writes into its pipe."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hvdtrain.agent.messages import encode
from hvdtrain.agent.rank_report import FailureRecord, RankReport, ReportPipe, read_record
from hvdtrain.config import REPORT_FD

INVALID: dict[str, dict[str, Any]] = {
    "string-for-a-step": {"step": "3"},
    "fractional-step": {"step": 3.5},
    "boolean": {"saved": True},
    "list": {"epoch": [1]},
    "number-for-a-phase": {"phase": 3},
    "null-for-an-operation": {"waiting_in": None},
}


@pytest.mark.parametrize("message", INVALID.values(), ids=INVALID)
def test_an_invalid_report_is_ignored(message: dict[str, Any]) -> None:
    assert read_record(RankReport, message) is None


def test_text_is_made_printable_and_cut() -> None:
    report = read_record(RankReport, {"phase": "a\nb\x1b[2J", "waiting_in": "x" * 5000})
    assert report is not None
    assert report.phase == "a?b?[2J"
    assert len(report.waiting_in) == 500


FAILURE = {"exception": "KeyError", "message": "'x'", "traceback": "a\nb\x1b[2J", "time_s": 5.0}


def test_a_failure_record() -> None:
    expected = FailureRecord(exception="KeyError", message="'x'", traceback="a\nb?[2J", time_s=5.0)
    assert read_record(FailureRecord, {"kind": "failure", **FAILURE}) == expected
    for name in FAILURE:
        assert read_record(FailureRecord, {**FAILURE, name: [7]}) is None
        incomplete = {other: FAILURE[other] for other in FAILURE if other != name}
        assert read_record(FailureRecord, incomplete) is None


KINDS = {
    "PeerFailedError": "follows",
    "CollectiveTimeoutError": "hang",
    "KeyboardInterrupt": "interrupt",
    "SystemExit": "interrupt",
    "KeyError": "exception",
}


@pytest.mark.parametrize("exception", KINDS)
def test_kind_of_failure(exception: str) -> None:
    assert FailureRecord(exception=exception).kind == KINDS[exception]


def write(pipe: ReportPipe, data: bytes) -> None:
    number, inode = map(int, pipe.variables[REPORT_FD].split(":"))
    assert os.fstat(number).st_ino == inode
    os.write(number, data)


def test_the_pipe_carries_only_reports_and_failures() -> None:
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
    pipe.close_writer()
    assert pipe.read() is None


@pytest.mark.parametrize("garbage", [b"hello\n", b"[]\n", b"x" * 60_000 + b"\n"])
def test_invalid_data_closes_the_pipe(garbage: bytes) -> None:
    pipe = ReportPipe()
    write(pipe, garbage)
    assert pipe.read() is None
    pipe.close_writer()
