"""Signals that come to ``hvdtrain run``, as it notes them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hvdtrain.launch.attempts import caught_signals, pause


def test_they_are_noted_and_then_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with caught_signals() as received:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with caught_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.timeout(60)
def test_a_pause_ends_with_a_signal() -> None:
    assert pause(0.0, [])
    with caught_signals() as received:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert not pause(1000.0, received)
        timer.join(30)
