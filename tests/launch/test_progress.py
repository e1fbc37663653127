"""The progress of a job, hangs among it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hvdtrain.agent.messages import encode
from hvdtrain.agent.rank_report import (
    FailureRecord,
    RankReport,
    ReportPipe,
    Usage,
    read_failure,
    read_report,
)
from hvdtrain.config import REPORT_FD
from hvdtrain.launch.hang import FIRST_STEP_FACTOR, describe_hang, hangs, stuck
from hvdtrain.launch.observer import CheckpointSaved, Event, Observer, Progress, RankTable
from hvdtrain.launch.progress import (
    RANKS_INTERVAL_S,
    WINDOW_S,
    JobProgress,
    Pace,
    PhaseTimes,
    ProgressRecord,
    RankPaces,
    TrainingWaits,
    find_straggler,
    held_by,
)

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
    pipe.close_writer()
    assert pipe.read() is None


@pytest.mark.parametrize("garbage", [b"hello\n", b"[]\n", b"x" * 60_000 + b"\n"])
def test_garbage_in_the_pipe_ends_it(garbage: bytes) -> None:
    pipe = ReportPipe()
    write(pipe, garbage)
    assert pipe.read() is None
    pipe.close_writer()


LIMIT_S = 10.0
BUSY = RankReport(phase="training", step=5)
WAITS = RankReport(phase="training", step=5, waiting_in="end, for the parameter servers")
AFTER = RankReport(phase="after fit", step=9, waiting_in="end, for the parameter servers")


def noted(*states: RankReport, at: float = 100.0) -> JobProgress:
    reports = JobProgress()
    for rank, state in enumerate(states):
        reports.note(rank, state, at)
    return reports


# The ranks' states, the seconds since something moved, and whether that is a hang.
JUDGED: dict[str, tuple[list[RankReport], float, bool]] = {
    "steps": ([BUSY, BUSY], 9.0, False),
    "no-steps": ([BUSY, BUSY], 11.0, True),
    "one-rank-only-reports": ([BUSY], 11.0, True),
    "nobody-reports": ([], 1000.0, False),
    "no-phase": ([RankReport(step=5), RankReport(step=5)], 1000.0, False),
    "validation": ([RankReport(phase="validation", step=5)] * 2, 1000.0, False),
    "one-writes-a-checkpoint": ([RankReport(phase="checkpoint", step=5), BUSY], 1000.0, False),
    "all-have-ended-but-one": ([AFTER, BUSY], 11.0, True),
    "all-have-ended-but-one-that-waited": ([AFTER, WAITS], 11.0, True),
    "all-have-ended": ([AFTER, AFTER], 1000.0, False),
    "first-step": ([RankReport(phase="training")] * 2, 11.0, False),
    "first-step-for-long": ([RankReport(phase="training")] * 2, 10.0 * FIRST_STEP_FACTOR + 1, True),
    "first-step-after-a-resume": (
        [RankReport(phase="training", resumed=5, step=5)] * 2,
        11.0,
        False,
    ),
    "step-after-a-resume": ([RankReport(phase="training", resumed=5, step=6)] * 2, 11.0, True),
}


@pytest.mark.parametrize(("states", "quiet_s", "expected"), JUDGED.values(), ids=JUDGED)
def test_hangs(states: list[RankReport], quiet_s: float, expected: bool) -> None:
    reports = noted(*states)
    assert hangs(reports, [0, 1], 100.0 + quiet_s, LIMIT_S) is expected
    assert not hangs(reports, [0, 1], 100.0 + quiet_s, 0.0), "0 is for as long as it likes"


def test_ranks_that_have_ended_do_not_count() -> None:
    reports = noted(BUSY, RankReport(phase="validation", step=5))
    assert not hangs(reports, [0, 1], 111.0, LIMIT_S)
    assert hangs(reports, [0], 111.0, LIMIT_S)
    assert not hangs(reports, [], 111.0, LIMIT_S)


def test_time_in_which_no_report_could_come_does_not_count() -> None:
    reports = noted(*[RankReport(phase="training", step=5)] * 2)
    reports.make_up_for(60.0, 165.0)
    reports.make_up_for(60.0, 165.0)
    assert reports.moved_at == 165.0, "never later than now"
    assert not hangs(reports, [0, 1], 165.0 + LIMIT_S, LIMIT_S)
    assert hangs(reports, [0, 1], 166.0 + LIMIT_S, LIMIT_S)


NEW = RankReport(phase="training", step=6)
SERVES = RankReport(phase="serving")
FIRST = RankReport(phase="training")
# What the ranks reported first, what they did 8 s later, and who is stuck 11 s after the first.
STUCK: dict[str, tuple[list[RankReport], dict[int, RankReport], list[int]]] = {
    "others-go-on": ([BUSY, BUSY, SERVES], {0: NEW}, [1]),
    "others-wait": ([WAITS, BUSY, SERVES], {}, [1]),
    "another-validates": ([RankReport(phase="validation", step=5), BUSY], {}, [1]),
    "all-of-them": ([BUSY, BUSY, SERVES], {}, []),
    "nobody": ([BUSY, BUSY], {0: NEW, 1: NEW}, []),
    "waits": ([BUSY, WAITS], {0: NEW}, []),
    "validates": ([BUSY, RankReport(phase="validation", step=5)], {0: NEW}, []),
    "first-step": ([BUSY, FIRST], {0: NEW}, []),
    "first-step-after-a-resume": (
        [BUSY, RankReport(phase="training", step=5, resumed=5)],
        {0: NEW},
        [],
    ),
    "several": ([BUSY, BUSY, BUSY], {0: NEW}, [1, 2]),
}


@pytest.mark.parametrize(("states", "later", "expected"), STUCK.values(), ids=STUCK)
def test_stuck(states: list[RankReport], later: dict[int, RankReport], expected: list[int]) -> None:
    reports = noted(*states)
    for rank, state in later.items():
        reports.note(rank, state, 108.0)
    running = range(len(states))
    assert stuck(reports, running, 111.0, LIMIT_S) == dict.fromkeys(expected, 11.0)
    assert stuck(reports, running, 111.0, 0.0) == {}, "0 is for as long as it likes"
    assert stuck(reports, [rank for rank in running if rank not in expected], 111.0, LIMIT_S) == {}


def test_stuck_in_the_first_step() -> None:
    """It may be short: a rank reports every second, and may hang before it reported any."""
    reports = noted(BUSY, FIRST)
    reports.note(0, NEW, 140.0)
    assert stuck(reports, [0, 1], 100.0 + LIMIT_S * FIRST_STEP_FACTOR, LIMIT_S) == {}
    assert stuck(reports, [0, 1], 141.0, LIMIT_S) == {1: 41.0}


HOSTS = {0: "a", 1: "a", 2: "b"}
WELL = dict.fromkeys(HOSTS, False)


def waits(operation: str = "allreduce(gradients)") -> RankReport:
    return RankReport(phase="training", step=5, waiting_in=operation)


def described(*states: RankReport, stopped: dict[int, bool] | None = None) -> list[str]:
    head, *lines = describe_hang(
        noted(*states), HOSTS, WELL if stopped is None else stopped, 12.4
    ).splitlines()
    assert head == "the job hangs: no rank has done a step for 12 s after step 5"
    return lines


OTHERS = "rank 0, 2 waits in allreduce(gradients) of step 6"


def test_a_rank_that_does_something_else_is_missing() -> None:
    lines = described(waits(), BUSY, waits())
    assert lines == ["missing: rank 1 on a: it waits for no other rank", OTHERS]


def test_a_stopped_rank_is_missing_whatever_it_said_last() -> None:
    lines = described(waits(), waits(), waits(), stopped={**WELL, 1: True})
    assert lines == ["missing: rank 1 on a: it is stopped (state T)", OTHERS]


def test_a_rank_whose_agent_is_silent_is_missing() -> None:
    lines = described(waits(), waits(), waits(), stopped={0: False, 2: False})
    assert lines == ["missing: rank 1 on a: its agent does not answer", OTHERS]


def test_nobody_is_missing() -> None:
    (line,) = described(BUSY, BUSY, BUSY)
    assert line.startswith("no rank waits for another")


def test_ranks_in_different_operations() -> None:
    lines = described(waits(), waits("barrier"), waits())
    assert lines[0] == OTHERS
    assert lines[1] == "rank 1 waits in barrier of step 6"
    assert "the program differs" in lines[2]


def test_who_holds_up_the_others() -> None:
    reports = noted(waits(), BUSY, waits())
    for rank in range(3):
        reports.usage[rank] = Usage(rss_bytes=1, cpu=0.0)
    assert held_by(reports, [2, 0, 1], 104.0, 5.0) == [], "a step may take as long"
    assert held_by(reports, [2, 0, 1], 106.0, 5.0) == [1]
    assert held_by(reports, [2, 0], 106.0, 5.0) == [], "it has ended"
    # Its last word is that it waits, for an operation that has long been done.
    reports.usage[2] = Usage(rss_bytes=1, cpu=0.0, stopped=True)
    assert held_by(reports, [2, 0], 106.0, 5.0) == [2]
    assert held_by(noted(BUSY, BUSY), [0, 1], 106.0, 5.0) == [], "nobody waits"


def test_ranks_are_listed_in_order_though_agents_connect_in_any() -> None:
    reports = noted(waits(), BUSY, waits())
    hosts = {2: "b", 0: "a", 1: "a"}
    lines = describe_hang(reports, hosts, WELL, 12.4).splitlines()
    assert lines[-1].startswith("rank 0, 2 waits in allreduce(gradients)")


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
        ("counting sheep", 30.0),
    ):
        times.note(phase, at)
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
    for rank, told in enumerate(ranks):
        before = RankReport()
        for phase, waited_s, input_s in told:
            now = RankReport(phase=phase, waited_s=waited_s, input_s=input_s)
            waits.note(rank, before, now)
            before = now
    return waits


def test_waits_of_other_phases_are_none_of_training() -> None:
    waits = _waits(
        [
            ("compiling", 1.0, 2.0),
            ("training", 7.0, 5.0),  # of which all was before
            ("training", 8.0, 5.5),
            ("validation", 8.5, 6.0),
            ("training", 20.0, 6.0),
            ("end of an epoch", 20.5, 6.0),
            ("training", 21.5, 7.0),
        ],
        [("training", 0.0, None), ("training", 0.0, None)],
    )
    assert waits.shares(10.0) == pytest.approx(((1.5 + 1.5) / 2 / 10, 2.0 / 10))


def test_ranks_wait_for_one_thing_at_a_time() -> None:
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
    """Ranks take so long for each step themselves, and wait for the slowest; reports each step.

    Rank 1 tells that it waits ``input_s`` of each for its input.
    """
    step_s = max(own_s.values())
    for step in range(steps):
        now = begin + step * step_s
        for rank, mine_s in own_s.items():
            waited = 100.0 + (first + step) * (step_s - mine_s)
            report = RankReport(
                step=first + step,
                phase="training",
                waited_s=waited,
                input_s=input_s * step if input_s is not None and rank == 1 else None,
                reduced_bytes=500 * step if rank == 1 else None,
            )
            paces.note(rank, report, now)
    return begin + steps * step_s


def test_what_a_rank_takes_itself_is_what_it_does_not_wait() -> None:
    paces = RankPaces()
    assert paces.in_all() == {}
    _train(paces, {0: 0.1, 1: 0.4, 2: 0.1}, 5.0, 20, first=1)
    own_s = {rank: pace.own_s for rank, pace in paces.in_all().items()}
    assert own_s == pytest.approx({0: 0.1, 1: 0.4, 2: 0.1})
    found = find_straggler(paces.of_late())
    assert found is not None
    assert (found.rank, found.factor) == (1, pytest.approx(4.0))


@pytest.mark.parametrize(("input_s", "is_starved"), [(0.3, True), (0.1, False), (None, False)])
def test_what_a_rank_waits_for_its_input_is_its_own(
    input_s: float | None, is_starved: bool
) -> None:
    paces = RankPaces()
    _train(paces, {0: 0.1, 1: 0.4}, 5.0, 20, first=1, input_s=input_s)
    assert paces.in_all()[1] == pytest.approx(Pace(0.4, input_s or 0.0, 500 / 0.4))
    assert paces.in_all()[0] == pytest.approx(Pace(0.1, 0.0, 0.0))
    found = find_straggler(paces.of_late())
    assert found is not None
    assert (found.rank, found.is_starved) == (1, is_starved)


def test_of_late_is_not_in_all() -> None:
    paces = RankPaces()
    # Rank 0 was slow for long, and rank 1 is now.
    end = _train(paces, {0: 0.5, 1: 0.1}, 0.0, 200, first=1)
    steps = round(2 * WINDOW_S / 0.5)
    # Waiting goes on counting from where it was.
    for step in range(steps):
        waits = {0: 100.0 + step * 0.4, 1: 100.0 + 200 * 0.4}
        for rank, waited in waits.items():
            report = RankReport(step=201 + step, phase="training", waited_s=waited)
            paces.note(rank, report, end + step * 0.5)
    late = find_straggler(paces.of_late())
    assert late is not None
    assert late.rank == 1
    assert late.own_s == pytest.approx(0.5, rel=0.1)


def test_reports_of_other_phases_and_without_waits_do_not_count() -> None:
    paces = RankPaces()
    for step in range(5):
        paces.note(0, RankReport(step=step, phase="training"), float(step))
        paces.note(1, RankReport(step=step, phase="compiling", waited_s=0.0), float(step))
        paces.note(2, RankReport(phase="training", waited_s=0.0), float(step))
        paces.note(3, RankReport(step=7, phase="training", waited_s=0.0), float(step))
    assert paces.in_all() == {}


@pytest.mark.parametrize(
    ("own_s", "slowest"),
    [
        ({}, None),
        ({0: 1.0}, None),
        ({0: 1.0, 1: 1.2}, None),
        ({0: 1.0, 1: 1.5}, 1),
        ({0: 0.002, 1: 0.004}, None),  # waits that short are not measured
        ({0: 0.0, 1: 0.1}, 1),
        ({rank: 1.0 + (rank == 700) for rank in range(1000)}, 700),
        ({0: 2.0, 1: 2.0, 2: 1.0}, None),
    ],
)
def test_who_is_much_slower_than_the_others_is_named(own_s, slowest) -> None:
    found = find_straggler({rank: Pace(seconds) for rank, seconds in own_s.items()})
    assert (found and found.rank) == slowest


def test_reports_that_come_at_once_tell_no_pace() -> None:
    paces = RankPaces()
    for step in (1, 9):
        paces.note(0, RankReport(step=step, phase="training", waited_s=0.0), 7.0)
    assert paces.in_all() == {}


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
