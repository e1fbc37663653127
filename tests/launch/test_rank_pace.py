from __future__ import annotations

import pytest

from hvdtrain.agent.rank_report import RankReport
from hvdtrain.launch.rank_pace import WINDOW_S, Pace, RankPaces, find_straggler


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
