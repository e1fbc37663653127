"""Events on the progress of a job, from the reports of its ranks."""

from __future__ import annotations

import pytest

from hvdtrain.agent.rank_report import RankReport, Usage
from hvdtrain.launch.job_progress import JobProgress
from hvdtrain.launch.observer import CheckpointSaved, Event, Observer, Progress, RankTable
from hvdtrain.launch.progress_record import RANKS_INTERVAL_S, ProgressRecord


class Events(Observer):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def test_what_is_new_is_written_now_and_then() -> None:
    observer, reports = Events(), JobProgress(0.0)
    record = ProgressRecord(
        observer, reports, 3, hosts=lambda: {2: "node1"}, running=lambda: [0, 2]
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
    progress = observer.of(Progress)
    # Once a second, not with each report.
    assert 19 <= len(progress) <= 22
    assert (progress[-1].step, progress[-1].held_by) == (40, [])
    assert progress[-1].slow == (2, 2.5, "node1")
    assert progress[-1].own_s == pytest.approx([0.2, 0.5])
    # Two ranks, each twice a second.
    assert progress[-1].reduced_bytes_per_s == 2 * 2 * 3000
    assert observer.of(CheckpointSaved) == [CheckpointSaved(step=20)]
    tables = [event.columns for event in observer.of(RankTable)]
    assert len(tables) == 1 + int(20 / RANKS_INTERVAL_S) + 1 - 1
    assert tables[-1]["step"] == [40, None, 40]
    assert tables[-1]["own_s"] == [0.2, None, 0.5]
    assert tables[-1]["reduced_bytes"] == [120_000, None, 120_000]
    assert tables[-1]["input_s"] == [None, None, 4.0]
    assert tables[-1]["rss_mb"] == [None, None, 300]
    assert tables[-1]["gpu_mb"] == [None, None, 5120]
    assert "gpu" not in tables[-1], "that is not known of any"


def test_who_keeps_the_job_from_going_on_is_named() -> None:
    observer, reports = Events(), JobProgress(0.0)
    record = ProgressRecord(observer, reports, 3, hosts=dict, running=lambda: [0, 1, 2])
    for rank in range(3):
        waiting_in = "" if rank == 1 else "allreduce(gradients)"
        reports.note(rank, RankReport(step=7, phase="training", waiting_in=waiting_in), 10.0)
    for now in (11.0, 14.0, 16.0, 18.0):
        record.review(now)
    # It goes on.
    for rank in range(3):
        reports.note(rank, RankReport(step=8, phase="training"), 19.0)
    record.review(19.5)
    assert [(event.step, event.held_by) for event in observer.of(Progress)] == [
        *((7, []), (7, [1]), (8, []))
    ]
