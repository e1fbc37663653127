"""When ranks meet, when a checkpoint is due, and what signals do."""

import os
import signal
from collections.abc import Iterator

import pytest

from hvdtrain.errors import ConfigurationError
from hvdtrain.keras.saving.checkpoint_callback import Checkpoint
from hvdtrain.keras.saving.checkpoint_schedule import (
    LOOK_S,
    MOST_STEPS,
    CheckpointSchedule,
    PreemptionSignals,
)

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_ALL = (*WARNINGS, signal.SIGTERM)


def test_without_a_word_it_is_every_epoch():
    assert CheckpointSchedule(None, None).every_epoch
    assert not CheckpointSchedule(5, None).every_epoch
    assert not CheckpointSchedule(None, 5.0).every_epoch


def test_due_by_steps():
    schedule = CheckpointSchedule(5, None)
    due = [step for step in range(1, 17) if schedule.is_due(step, step - 1)]
    assert due == [5, 10, 15]
    # With several steps in one go it is due after those that pass the number.
    assert schedule.is_due(6, 3)
    assert not schedule.is_due(9, 6)
    assert not CheckpointSchedule(None, 1.0).is_due(5, 4)


def test_late_by_seconds():
    schedule = CheckpointSchedule(None, 60.0)
    schedule.begin(0, 100.0)
    assert not schedule.is_overdue(159.9, due=False)
    assert schedule.is_overdue(160.0, due=False)
    schedule.note_taken(170.0)
    assert not schedule.is_overdue(229.9, due=False)
    assert schedule.is_overdue(230.0, due=False)
    assert not CheckpointSchedule(5, None).is_overdue(1e9, due=False)


def test_once_due_it_is_overdue_until_one_is_taken():
    schedule = CheckpointSchedule(5, None)
    assert schedule.is_overdue(1.0, due=True)
    assert schedule.is_overdue(2.0, due=False)
    schedule.note_taken(3.0)
    assert not schedule.is_overdue(4.0, due=False)
    schedule.begin(7, 5.0, overdue=True)
    assert schedule.is_overdue(5.0, due=False)


def test_ranks_meet_at_first_then_when_told_and_when_due():
    schedule = CheckpointSchedule(100, None)
    assert schedule.meets(1, 0)
    schedule.look_again(40)
    assert [step for step in range(2, 42) if schedule.meets(step, step - 1)] == [40, 41]
    schedule.look_again(1000)
    assert [step for step in range(42, 300) if schedule.meets(step, step - 1)] == [100, 200]


@pytest.mark.parametrize(
    ("step_s", "since_s", "expected"),
    [
        (LOOK_S / 10, 0.0, 10),
        (10 * LOOK_S, 0.0, 1),
        (0.0, 0.0, MOST_STEPS),
        (LOOK_S / 100, 59.75, int(0.25 / (LOOK_S / 100))),
        (LOOK_S / 100, 61.0, 1),
    ],
    ids=["some", "slow steps", "no time at all", "soon due", "overdue"],
)
def test_the_next_meeting_is_half_a_second_away(step_s, since_s, expected):
    schedule = CheckpointSchedule(None, 60.0)
    schedule.begin(20, since_s - 10 * step_s)
    schedule.note_taken(0.0)
    assert schedule.steps_ahead(30, since_s) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"every_steps": 0}, r"every_steps=0\): expected a whole number above 0"),
        ({"every_steps": 1.5}, "every_steps=1.5"),
        ({"every_s": 0}, r"every_s=0\): expected seconds, more than 0"),
        ({"keep": 0}, r"keep=0\): expected a whole number above 0"),
        ({"export": "model.h5"}, r"model\.h5.*a path that ends in \.keras"),
        ({"on_error": "stop"}, 'expected "warn" or "raise"'),
    ],
)
def test_arguments_that_cannot_be_used(options, told, tmp_path):
    with pytest.raises(ConfigurationError, match=told):
        Checkpoint(tmp_path, **options)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _ALL}
    for number in _ALL:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _caught() -> PreemptionSignals:
    signals = PreemptionSignals()
    signals.catch()
    return signals


def test_a_signal_is_noted_and_the_first_counts() -> None:
    signals = _caught()
    assert signals.received == 0
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGUSR2


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_that_comes_again_kills_nobody_on_the_way_out(number: signal.Signals) -> None:
    signals = _caught()
    os.kill(os.getpid(), number)
    signals.release(handled=True)
    os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_without_one_all_is_as_before() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGUSR2)
    _caught().release(handled=False)
    expected = [signal.SIG_DFL, own, signal.SIG_DFL]
    assert [signal.getsignal(number) for number in _ALL] == expected


def test_a_programs_own_handler_hears_what_was_not_handled() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    signals = _caught()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == []
    signals.release(handled=False)
    assert heard == [signal.SIGUSR1]
