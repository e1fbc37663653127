"""The progress of a job, which is computed from the ranks' reports."""

from __future__ import annotations

import pytest

from hvdtrain.agent.rank_report import RankReport, Usage
from hvdtrain.launch.observer import CheckpointSaved, Event, Observer, Progress, RankTable
from hvdtrain.launch.progress import (
    TABLE_INTERVAL_S,
    WINDOW_S,
    JobProgress,
    Pace,
    PhaseTimes,
    ProgressPublisher,
    RankPaces,
    TrainingWaits,
    find_straggler,
    holding_up,
)


def test_progress_of_all_ranks() -> None:
    reports = JobProgress()
    assert (reports.step, reports.saved, reports.moved_at, reports.has_stepped) == (None,) * 3 + (
        False,
    )
    reports.add(0, RankReport(resumed=10), 1.0)
    assert (reports.step, reports.saved, reports.has_stepped) == (None, 10, False)
    reports.add(1, RankReport(resumed=10, step=11), 2.0)
    assert (reports.step, reports.saved, reports.has_stepped) == (11, 10, True)
    assert (reports.moved_at, reports.saved_at) == (2.0, None)
    reports.add(0, RankReport(resumed=10, step=11, saved=11), 3.0)
    assert (reports.step, reports.saved, reports.saved_at) == (11, 11, 3.0)
    reports.add(1, RankReport(resumed=10, step=11, waiting_in="barrier"), 4.0)
    assert reports.moved_at == 3.0, "a wait is not progress"
    reports.add(1, RankReport(resumed=10, step=11, phase="validation"), 5.0)
    assert reports.moved_at == 5.0


BUSY = RankReport(phase="training", step=5)
WAITING = RankReport(phase="training", step=5, waiting_in="allreduce(gradients)")


def noted(*states: RankReport, at: float = 100.0) -> JobProgress:
    reports = JobProgress()
    for rank, state in enumerate(states):
        reports.add(rank, state, at)
    return reports


def test_ranks_that_hold_up_the_others() -> None:
    reports = noted(WAITING, BUSY, WAITING)
    for rank in range(3):
        reports.usage[rank] = Usage(rss_bytes=1, cpu=0.0)
    assert holding_up(reports, [2, 0, 1], 104.0, 5.0) == [], "steps may take that long"
    assert holding_up(reports, [2, 0, 1], 106.0, 5.0) == [1]
    assert holding_up(reports, [2, 0], 106.0, 5.0) == [], "it has ended"
    # The last report of a stopped rank may be a wait for a finished operation.
    reports.usage[2] = Usage(rss_bytes=1, cpu=0.0, stopped=True)
    assert holding_up(reports, [2, 0], 106.0, 5.0) == [2]
    assert holding_up(noted(BUSY, BUSY), [0, 1], 106.0, 5.0) == [], "no rank waits"


def test_phases_add_up_to_the_whole_time() -> None:
    times = PhaseTimes(10.0)
    for phase, at in (
        ("started", 12.0),
        ("compiling", 13.0),
        ("training", 15.0),
        ("training", 16.0),
        ("checkpoint", 20.0),
        ("training", 21.0),
        ("end of an epoch", 24.0),
        ("validation", 25.0),
        ("training", 27.0),
        ("resting", 30.0),
    ):
        times.enter(phase, at)
    seconds = times.seconds(31.0)
    assert seconds == pytest.approx(
        {
            "start": 5.0,
            "training": 5.0 + 4.0 + 3.0,
            "checkpoints": 1.0,
            "validation": 2.0,
            "other": 1,
        }
    )
    assert sum(times.seconds(40.0).values()) == pytest.approx(30.0)


def _waits(*ranks: list[tuple[str, float | None, float | None]]) -> TrainingWaits:
    waits = TrainingWaits()
    for rank, reports in enumerate(ranks):
        before = RankReport()
        for phase, waited_s, input_s in reports:
            now = RankReport(phase=phase, waited_s=waited_s, input_s=input_s)
            waits.add(rank, before, now)
            before = now
    return waits


def test_waits_outside_training_do_not_count() -> None:
    waits = _waits(
        [
            ("compiling", 1.0, 2.0),
            ("training", 7.0, 5.0),  # all of it before training
            ("training", 8.0, 5.5),
            ("validation", 8.5, 6.0),
            ("training", 20.0, 6.0),
            ("end of an epoch", 20.5, 6.0),
            ("training", 21.5, 7.0),
        ],
        [("training", 0.0, None), ("training", 0.0, None)],
    )
    assert waits.shares(10.0) == pytest.approx(((1.5 + 1.5) / 2 / 10, 2.0 / 10))


def test_waits_never_exceed_training() -> None:
    waits = _waits([("training", 0.0, 0.0), ("training", 6.0, 9.0)])
    assert waits.shares(10.0) == pytest.approx((0.6, 0.4))
    assert waits.shares(0.0) == (None, None)
    assert _waits([("training", None, None)] * 2).shares(10.0) == (None, None)


def _train(
    paces: RankPaces,
    own_s: dict[int, float],
    begin: float,
    steps: int,
    first: int,
    input_s: float | None = None,
) -> float:
    """Report steps of ranks with these own times. Each rank waits for the slowest one.

    Rank 1 also waits ``input_s`` of each step for its input.
    """
    step_s = max(own_s.values())
    for step in range(steps):
        now = begin + step * step_s
        for rank, rank_s in own_s.items():
            waited = 100.0 + (first + step) * (step_s - rank_s)
            report = RankReport(
                step=first + step,
                phase="training",
                waited_s=waited,
                input_s=input_s * step if input_s is not None and rank == 1 else None,
                reduced_bytes=500 * step if rank == 1 else None,
            )
            paces.add(rank, report, now)
    return begin + steps * step_s


def test_own_time_excludes_waits() -> None:
    paces = RankPaces()
    assert paces.overall() == {}
    _train(paces, {0: 0.1, 1: 0.4, 2: 0.1}, 5.0, 20, first=1)
    own_s = {rank: pace.own_s for rank, pace in paces.overall().items()}
    assert own_s == pytest.approx({0: 0.1, 1: 0.4, 2: 0.1})
    straggler = find_straggler(paces.recent())
    assert straggler is not None
    assert (straggler.rank, straggler.factor) == (1, pytest.approx(4.0))


@pytest.mark.parametrize(("input_s", "is_starved"), [(0.3, True), (0.1, False), (None, False)])
def test_own_time_includes_waits_for_input(input_s: float | None, is_starved: bool) -> None:
    paces = RankPaces()
    _train(paces, {0: 0.1, 1: 0.4}, 5.0, 20, first=1, input_s=input_s)
    assert paces.overall()[1] == pytest.approx(Pace(0.4, input_s or 0.0, 500 / 0.4))
    assert paces.overall()[0] == pytest.approx(Pace(0.1, 0.0, 0.0))
    straggler = find_straggler(paces.recent())
    assert straggler is not None
    assert (straggler.rank, straggler.is_starved) == (1, is_starved)


def test_the_recent_straggler_may_differ_from_the_overall_one() -> None:
    paces = RankPaces()
    # Rank 0 was slow for long, and rank 1 is now.
    end = _train(paces, {0: 0.5, 1: 0.1}, 0.0, 200, first=1)
    steps = round(2 * WINDOW_S / 0.5)
    for step in range(steps):
        waits = {0: 100.0 + step * 0.4, 1: 100.0 + 200 * 0.4}
        for rank, waited in waits.items():
            report = RankReport(step=201 + step, phase="training", waited_s=waited)
            paces.add(rank, report, end + step * 0.5)
    late = find_straggler(paces.recent())
    assert late is not None
    assert late.rank == 1
    assert late.own_s == pytest.approx(0.5, rel=0.1)


def test_only_reports_of_training_with_waits_are_used() -> None:
    paces = RankPaces()
    for step in range(5):
        paces.add(0, RankReport(step=step, phase="training"), float(step))
        paces.add(1, RankReport(step=step, phase="compiling", waited_s=0.0), float(step))
        paces.add(2, RankReport(phase="training", waited_s=0.0), float(step))
        paces.add(3, RankReport(step=7, phase="training", waited_s=0.0), float(step))
    assert paces.overall() == {}


@pytest.mark.parametrize(
    ("own_s", "slowest"),
    [
        ({}, None),
        ({0: 1.0}, None),
        ({0: 1.0, 1: 1.2}, None),
        ({0: 1.0, 1: 1.5}, 1),
        ({0: 0.002, 1: 0.004}, None),  # too short to be measured
        ({0: 0.0, 1: 0.1}, 1),
        ({rank: 1.0 + (rank == 700) for rank in range(1000)}, 700),
        ({0: 2.0, 1: 2.0, 2: 1.0}, None),
    ],
)
def test_find_straggler(own_s, slowest) -> None:
    straggler = find_straggler({rank: Pace(seconds) for rank, seconds in own_s.items()})
    assert (straggler and straggler.rank) == slowest


def test_simultaneous_reports_have_no_pace() -> None:
    paces = RankPaces()
    for step in (1, 9):
        paces.add(0, RankReport(step=step, phase="training", waited_s=0.0), 7.0)
    assert paces.overall() == {}


class Events(Observer):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def test_progress_is_published_once_a_second() -> None:
    observer, reports = Events(), JobProgress(0.0)
    publisher = ProgressPublisher(observer, reports, 3)
    publisher.review(0.0, {2: "node1"}, [0, 2])
    for step in range(1, 41):
        now = step * 0.5
        for rank, waits in ((0, 0.3), (2, 0.0)):
            report = RankReport(
                step=step,
                epoch=0,
                phase="training",
                waited_s=waits * step,
                input_s=None if rank == 0 else 0.1 * step,
                reduced_bytes=3000 * step,
                saved=20 if step >= 20 else None,
            )
            reports.add(rank, report, now)
        reports.usage[2] = Usage(rss_bytes=300 << 20, cpu=1.5, gpu_bytes=5 << 30)
        publisher.review(now, {2: "node1"}, [0, 2])
    publisher.review(20.1, {2: "node1"}, [0, 2], last=True)
    progress = observer.of(Progress)
    assert 19 <= len(progress) <= 22
    assert (progress[-1].step, progress[-1].held_by) == (40, [])
    assert progress[-1].slow == (2, 2.5, "node1")
    assert progress[-1].own_s == pytest.approx([0.2, 0.5])
    # Two ranks, each twice a second.
    assert progress[-1].reduced_bytes_per_s == 2 * 2 * 3000
    assert observer.of(CheckpointSaved) == [CheckpointSaved(step=20)]
    tables = [event.columns for event in observer.of(RankTable)]
    assert len(tables) == 1 + int(20 / TABLE_INTERVAL_S) + 1 - 1
    assert tables[-1]["step"] == [40, None, 40]
    assert tables[-1]["own_s"] == [0.2, None, 0.5]
    assert tables[-1]["reduced_bytes"] == [120_000, None, 120_000]
    assert tables[-1]["input_s"] == [None, None, 4.0]
    assert tables[-1]["rss_mb"] == [None, None, 300]
    assert tables[-1]["gpu_mb"] == [None, None, 5120]
    assert "gpu" not in tables[-1], "unknown for all ranks"


def test_ranks_that_hold_up_the_job_are_published() -> None:
    observer, reports = Events(), JobProgress(0.0)
    publisher = ProgressPublisher(observer, reports, 3)
    for rank in range(3):
        waiting_in = "" if rank == 1 else "allreduce(gradients)"
        reports.add(rank, RankReport(step=7, phase="training", waiting_in=waiting_in), 10.0)
    for now in (11.0, 14.0, 16.0, 18.0):
        publisher.review(now, {}, [0, 1, 2])
    # The job continues.
    for rank in range(3):
        reports.add(rank, RankReport(step=8, phase="training"), 19.0)
    publisher.review(19.5, {}, [0, 1, 2])
    assert [(event.step, event.held_by) for event in observer.of(Progress)] == [
        *((7, []), (7, [1]), (8, []))
    ]
