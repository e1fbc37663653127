from __future__ import annotations

import pytest

from hvdtrain.launch.phase_times import PhaseTimes


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
