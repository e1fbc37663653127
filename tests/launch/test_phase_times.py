from __future__ import annotations

import pytest

from hvdtrain.agent.rank_report import RankReport
from hvdtrain.launch.phase_times import PhaseTimes, TrainingWaits


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
