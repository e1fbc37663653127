"""The detection and description of hangs."""

from __future__ import annotations

import pytest

from hvdtrain.agent.rank_report import RankReport
from hvdtrain.launch.hang import FIRST_STEP_FACTOR, describe_hang, is_hanging, stuck_ranks
from hvdtrain.launch.progress import JobProgress

LIMIT_S = 10.0
BUSY = RankReport(phase="training", step=5)
WAITING = RankReport(phase="training", step=5, waiting_in="end, for the parameter servers")
AFTER = RankReport(phase="after fit", step=9, waiting_in="end, for the parameter servers")


def noted(*states: RankReport, at: float = 100.0) -> JobProgress:
    reports = JobProgress()
    for rank, state in enumerate(states):
        reports.add(rank, state, at)
    return reports


# The ranks' states, the seconds without progress, and whether that is a hang.
HANGS: dict[str, tuple[list[RankReport], float, bool]] = {
    "steps": ([BUSY, BUSY], 9.0, False),
    "no-steps": ([BUSY, BUSY], 11.0, True),
    "one-rank-only-reports": ([BUSY], 11.0, True),
    "no-reports": ([], 1000.0, False),
    "no-phase": ([RankReport(step=5), RankReport(step=5)], 1000.0, False),
    "validation": ([RankReport(phase="validation", step=5)] * 2, 1000.0, False),
    "one-writes-a-checkpoint": ([RankReport(phase="checkpoint", step=5), BUSY], 1000.0, False),
    "all-have-ended-but-one": ([AFTER, BUSY], 11.0, True),
    "all-have-ended-but-one-that-waited": ([AFTER, WAITING], 11.0, True),
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


@pytest.mark.parametrize(("states", "quiet_s", "expected"), HANGS.values(), ids=HANGS)
def test_is_hanging(states: list[RankReport], quiet_s: float, expected: bool) -> None:
    reports = noted(*states)
    assert is_hanging(reports, [0, 1], 100.0 + quiet_s, LIMIT_S) is expected
    assert not is_hanging(reports, [0, 1], 100.0 + quiet_s, 0.0), "0 disables the limit"


def test_ended_ranks_do_not_count() -> None:
    reports = noted(BUSY, RankReport(phase="validation", step=5))
    assert not is_hanging(reports, [0, 1], 111.0, LIMIT_S)
    assert is_hanging(reports, [0], 111.0, LIMIT_S)
    assert not is_hanging(reports, [], 111.0, LIMIT_S)


def test_time_while_the_launcher_was_suspended_does_not_count() -> None:
    reports = noted(*[RankReport(phase="training", step=5)] * 2)
    reports.skip(60.0, 165.0)
    reports.skip(60.0, 165.0)
    assert reports.moved_at == 165.0, "never in the future"
    assert not is_hanging(reports, [0, 1], 165.0 + LIMIT_S, LIMIT_S)
    assert is_hanging(reports, [0, 1], 166.0 + LIMIT_S, LIMIT_S)


NEW = RankReport(phase="training", step=6)
SERVES = RankReport(phase="serving")
FIRST = RankReport(phase="training")
# First reports, reports 8 s later, and the ranks that are stuck 11 s after the first.
STUCK: dict[str, tuple[list[RankReport], dict[int, RankReport], list[int]]] = {
    "others-continue": ([BUSY, BUSY, SERVES], {0: NEW}, [1]),
    "others-wait": ([WAITING, BUSY, SERVES], {}, [1]),
    "another-validates": ([RankReport(phase="validation", step=5), BUSY], {}, [1]),
    "all": ([BUSY, BUSY, SERVES], {}, []),
    "none": ([BUSY, BUSY], {0: NEW, 1: NEW}, []),
    "waits": ([BUSY, WAITING], {0: NEW}, []),
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
        reports.add(rank, state, 108.0)
    running = range(len(states))
    assert stuck_ranks(reports, running, 111.0, LIMIT_S) == dict.fromkeys(expected, 11.0)
    assert stuck_ranks(reports, running, 111.0, 0.0) == {}, "0 disables the limit"
    assert (
        stuck_ranks(reports, [rank for rank in running if rank not in expected], 111.0, LIMIT_S)
        == {}
    )


def test_stuck_in_the_first_step() -> None:
    reports = noted(BUSY, FIRST)
    reports.add(0, NEW, 140.0)
    assert stuck_ranks(reports, [0, 1], 100.0 + LIMIT_S * FIRST_STEP_FACTOR, LIMIT_S) == {}
    assert stuck_ranks(reports, [0, 1], 141.0, LIMIT_S) == {1: 41.0}


HOSTS = {0: "a", 1: "a", 2: "b"}
WELL = dict.fromkeys(HOSTS, False)


def waiting(operation: str = "allreduce(gradients)") -> RankReport:
    return RankReport(phase="training", step=5, waiting_in=operation)


def described(*states: RankReport, stopped: dict[int, bool] | None = None) -> list[str]:
    head, *lines = describe_hang(
        noted(*states), HOSTS, WELL if stopped is None else stopped, 12.4
    ).splitlines()
    assert head == "the job hangs: no rank has completed a step for 12 s after step 5"
    return lines


OTHERS = "ranks 0, 2 wait in step 6: allreduce(gradients)"


def test_a_busy_rank_is_missing() -> None:
    lines = described(waiting(), BUSY, waiting())
    assert lines == ["rank 1 on a has not arrived: not waiting for other ranks", OTHERS]


def test_a_stopped_rank_is_missing_even_if_it_reported_a_wait() -> None:
    lines = described(waiting(), waiting(), waiting(), stopped={**WELL, 1: True})
    assert lines == ["rank 1 on a has not arrived: stopped (state T)", OTHERS]


def test_a_rank_with_a_silent_agent_is_missing() -> None:
    lines = described(waiting(), waiting(), waiting(), stopped={0: False, 2: False})
    assert lines == ["rank 1 on a has not arrived: its agent does not answer", OTHERS]


def test_no_rank_is_missing() -> None:
    (line,) = described(BUSY, BUSY, BUSY)
    assert line.startswith("no rank waits for another")


def test_ranks_in_different_operations() -> None:
    lines = described(waiting(), waiting("barrier"), waiting())
    assert lines[0] == OTHERS
    assert lines[1] == "rank 1 waits in step 6: barrier"
    assert "different code" in lines[2]


def test_ranks_are_listed_in_order() -> None:
    reports = noted(waiting(), BUSY, waiting())
    hosts = {2: "b", 0: "a", 1: "a"}
    lines = describe_hang(reports, hosts, WELL, 12.4).splitlines()
    assert lines[-1].startswith("ranks 0, 2 wait in step 6: allreduce(gradients)")
