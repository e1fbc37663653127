from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from hvdtrain.agent.rank_report import RankReport, Usage
from hvdtrain.jobs.files import read_json_lines
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.launch.job_progress import JobProgress
from hvdtrain.launch.progress_record import RANKS_INTERVAL_S, ProgressRecord


def test_what_is_new_is_written_now_and_then(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    with contextlib.closing(JobRecorder(job)) as recorder:
        reports = JobProgress(0.0)
        record = ProgressRecord(
            recorder, reports, 3, hosts=lambda: {2: "node1"}, running=lambda: [0, 2]
        )
        record.review(0.0)
        for step in range(1, 41):
            now = step * 0.5
            for rank, waits in ((0, 0.3), (2, 0.0)):
                told = RankReport(
                    step=step,
                    epoch=0,
                    phase="training",
                    waited_s=waits * step,
                    input_s=None if rank == 0 else 0.1 * step,
                    reduced_bytes=3000 * step,
                    saved=20 if step >= 20 else None,
                )
                reports.note(rank, told, now)
            reports.usage[2] = Usage(rss_bytes=300 << 20, cpu=1.5, gpu_bytes=5 << 30)
            record.review(now)
        record.review(20.1, last=True)
    rows = list(read_json_lines(job.metrics))
    # Once a second, not with each report.
    assert 19 <= len(rows) <= 22
    assert rows[-1]["step"] == 40
    slow = [rows[-1][name] for name in ("slow", "slow_factor", "slow_host")]
    assert slow == [2, 2.5, "node1"]
    parts = [rows[-1][f"own_s{part}"] for part in ("_min", "", "_p95", "_max")]
    assert parts == pytest.approx([0.2, 0.35, 0.5, 0.5])
    assert [(e["kind"], e["step"]) for e in read_json_lines(job.events)] == [("checkpoint", 20)]
    state = job.state()
    assert state is not None
    assert (state.step, state.saved) == (40, 20)
    assert not any("held_by" in row for row in rows)
    of_ranks = list(read_json_lines(job.ranks))
    assert len(of_ranks) == 1 + int(20 / RANKS_INTERVAL_S) + 1 - 1
    assert of_ranks[-1]["step"] == [40, None, 40]
    assert of_ranks[-1]["own_s"] == [0.2, None, 0.5]
    # Two ranks, each twice a second.
    assert rows[-1]["reduced_bytes_per_s"] == 2 * 2 * 3000
    assert of_ranks[-1]["reduced_bytes"] == [120_000, None, 120_000]
    assert of_ranks[-1]["input_s"] == [None, None, 4.0]
    assert of_ranks[-1]["rss_mb"] == [None, None, 300]
    assert of_ranks[-1]["gpu_mb"] == [None, None, 5120]
    assert "gpu" not in of_ranks[-1], "that is not known of any"


def test_who_keeps_the_job_from_going_on_is_named(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    with contextlib.closing(JobRecorder(job)) as recorder:
        reports = JobProgress(0.0)
        record = ProgressRecord(recorder, reports, 3, hosts=dict, running=lambda: [0, 1, 2])
        for rank in range(3):
            waiting_in = "" if rank == 1 else "allreduce(gradients)"
            reports.note(rank, RankReport(step=7, phase="training", waiting_in=waiting_in), 10.0)
        for now in (11.0, 14.0, 16.0, 18.0):
            record.review(now)
        # It goes on.
        for rank in range(3):
            reports.note(rank, RankReport(step=8, phase="training"), 19.0)
        record.review(19.5)
    rows = list(read_json_lines(job.metrics))
    assert [(row["step"], row.get("held_by")) for row in rows] == [(7, None), (7, [1]), (8, None)]
