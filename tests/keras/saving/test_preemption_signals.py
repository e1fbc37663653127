"""What signals do before, in and after a training that they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from hvdtrain.keras.saving.preemption_signals import PreemptionSignals

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_ALL = (*WARNINGS, signal.SIGTERM)


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
