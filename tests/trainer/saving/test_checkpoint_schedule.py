"""The schedule of synchronizations and checkpoints, and the handling of signals."""

import os
import signal
from collections.abc import Iterator

import pytest

from hvdtrain.errors import ConfigurationError
from hvdtrain.trainer.saving.checkpoint_callback import Checkpoint
from hvdtrain.trainer.saving.checkpoint_schedule import (
    LOOK_S,
    MOST_STEPS,
    CheckpointSchedule,
    PreemptionSignals,
)

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_ALL = (*WARNINGS, signal.SIGTERM)


def test_the_default_is_every_epoch():
    assert CheckpointSchedule(None, None).every_epoch
    assert not CheckpointSchedule(5, None).every_epoch
    assert not CheckpointSchedule(None, 5.0).every_epoch


def test_due_by_steps():
    schedule = CheckpointSchedule(5, None)
    due = [step for step in range(1, 17) if schedule.is_due(step, step - 1)]
    assert due == [5, 10, 15]
    # Several steps may be made in one execution.
    assert schedule.is_due(6, 3)
    assert not schedule.is_due(9, 6)
    assert not CheckpointSchedule(None, 1.0).is_due(5, 4)


def test_due_by_seconds():
    schedule = CheckpointSchedule(None, 60.0)
    schedule.begin(0, 100.0)
    assert not schedule.is_overdue(159.9, due=False)
    assert schedule.is_overdue(160.0, due=False)
    schedule.note_taken(170.0)
    assert not schedule.is_overdue(229.9, due=False)
    assert schedule.is_overdue(230.0, due=False)
    assert not CheckpointSchedule(5, None).is_overdue(1e9, due=False)


def test_a_checkpoint_is_overdue_until_it_is_taken():
    schedule = CheckpointSchedule(5, None)
    assert schedule.is_overdue(1.0, due=True)
    assert schedule.is_overdue(2.0, due=False)
    schedule.note_taken(3.0)
    assert not schedule.is_overdue(4.0, due=False)
    schedule.begin(7, 5.0, overdue=True)
    assert schedule.is_overdue(5.0, due=False)


def test_when_ranks_synchronize():
    schedule = CheckpointSchedule(100, None)
    assert schedule.synchronizes(1, 0)
    schedule.next_look = 40
    assert [step for step in range(2, 42) if schedule.synchronizes(step, step - 1)] == [40, 41]
    schedule.next_look = 1000
    steps = [step for step in range(42, 300) if schedule.synchronizes(step, step - 1)]
    assert steps == [100, 200]


@pytest.mark.parametrize(
    ("step_s", "since_s", "expected"),
    [
        (LOOK_S / 10, 0.0, 10),
        (10 * LOOK_S, 0.0, 1),
        (0.0, 0.0, MOST_STEPS),
        (LOOK_S / 100, 59.75, int(0.25 / (LOOK_S / 100))),
        (LOOK_S / 100, 61.0, 1),
    ],
    ids=["fast", "slow", "no time", "soon due", "overdue"],
)
def test_ranks_synchronize_again_after_half_a_second(step_s, since_s, expected):
    schedule = CheckpointSchedule(None, 60.0)
    schedule.begin(20, since_s - 10 * step_s)
    schedule.note_taken(0.0)
    assert schedule.steps_ahead(30, since_s) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_steps": 0}, "every_steps .*must be a positive integer, got 0"),
        ({"every_steps": 1.5}, r"every_steps .*got 1\.5"),
        ({"every_s": 0}, "every_s .*must be a positive number of seconds, got 0"),
        ({"keep": 0}, "keep .*must be a positive integer, got 0"),
        ({"export": "model.h5"}, r"export .*\.keras path, got 'model\.h5'"),
        ({"on_error": "stop"}, 'on_error .*must be "warn" or "raise"'),
    ],
)
def test_invalid_arguments(options, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        Checkpoint(tmp_path, **options)


@pytest.fixture(autouse=True)
def restore_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _ALL}
    for number in _ALL:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _catch() -> PreemptionSignals:
    signals = PreemptionSignals()
    signals.catch()
    return signals


def test_the_first_signal_is_recorded() -> None:
    signals = _catch()
    assert signals.received == 0
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGUSR2


@pytest.mark.parametrize("number", WARNINGS)
def test_a_repeated_warning_doesnt_kill_the_process(number: signal.Signals) -> None:
    signals = _catch()
    os.kill(os.getpid(), number)
    signals.release(handled=True)
    os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_handlers_are_restored_and_get_unhandled_signals() -> None:
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    handlers = [signal.getsignal(number) for number in _ALL]
    signals = _catch()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert received == []
    signals.release(handled=False)
    assert received == [signal.SIGUSR1]
    assert [signal.getsignal(number) for number in _ALL] == handlers
