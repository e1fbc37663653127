"""A traceback is judged as a whole: shown, held back for another rank's failure, or left out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hvdtrain.launch.failure import RankExit
from hvdtrain.launch.tracebacks import TracebackFilter

HEADER = "Traceback (most recent call last):"
FRAME = '  File "train.py", line 3, in <module>'
CHAIN = ["", "During handling of the above exception, another exception occurred:", ""]
INTERRUPT = [HEADER, FRAME, "KeyboardInterrupt"]
INTERRUPT_IN_JOB = [*INTERRUPT, "hvdtrain: rank 0 of 2 failed: KeyboardInterrupt: "]
PEER = [HEADER, FRAME, "hvdtrain.errors.PeerFailedError: rank 1 failed:", "on two lines"]
WRAPPED_PEER = [
    *[HEADER, FRAME, "tensorflow.UnknownError: Graph execution error:", "", "Detected at node:"],
    *["hvdtrain: rank 0 of 2 stops: rank 1 failed"],
]
WRAPPED_INTERRUPT = [
    *[HEADER, FRAME, "RuntimeError: ORIGINAL UnknownError REPLACED BY KeyboardInterrupt: <EMPTY>"],
    *["", "At:", "  errors_impl.py(265): __init__", ""],
]
VALUE = [HEADER, FRAME, "ValueError: disk full"]
CRASH = [
    "Fatal Python error: Segmentation fault",
    "",
    "Thread 0x1 (most recent call first):",
    FRAME,
]
IGNORED = ["Exception ignored in: <module 'threading'>", *INTERRUPT[:-1], "KeyboardInterrupt: "]
WORKER = ["Process SpawnPoolWorker-1:", *INTERRUPT]
INTERLEAVED = [WORKER[0], "Process SpawnPoolWorker-2:", HEADER, HEADER, FRAME, FRAME]
HOLD_S = 5.0


@dataclass
class Author:
    number: int
    was_signalled: bool = False
    end: RankExit | None = None


class Screen:
    """Ranks that write to one screen."""

    def __init__(self, ranks: int = 3) -> None:
        self.ranks = [Author(number) for number in range(ranks)]
        self.ends: list[RankExit] = []
        self.shown: list[tuple[int, str]] = []
        self.now = 100.0
        self.tracebacks = TracebackFilter(
            self.ends, self._show, hold_s=HOLD_S, clock=lambda: self.now
        )

    def _show(self, number: int, line: str) -> None:
        self.shown.append((number, line))

    def write(self, number: int, *lines: str) -> None:
        for line in lines:
            if not self.tracebacks.take(self.ranks[number], line):
                self._show(number, line)

    def bid(self) -> None:
        for rank in self.ranks:
            rank.was_signalled = True

    def end(self, number: int, code: int | None) -> None:
        rank = self.ranks[number]
        rank.end = RankExit(rank=number, host="node1", code=code)
        self.ends.append(rank.end)
        self.tracebacks.review()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tracebacks.review()

    def of(self, number: int) -> list[str]:
        return [line for author, line in self.shown if author == number]


# What a rank writes after it was told to end, and what is seen of it.
ENDINGS: dict[str, tuple[list[str], list[str]]] = {
    "interrupt": (INTERRUPT, []),
    "interrupt-with-a-verdict": (INTERRUPT_IN_JOB, []),
    "echo": (PEER, []),
    "wrapped-interrupt": (WRAPPED_INTERRUPT, []),
    "wrapped-echo": (WRAPPED_PEER, []),
    "ignored": (IGNORED, []),
    "worker": (WORKER, []),
    "workers-at-once": ([*INTERLEAVED, "KeyboardInterrupt", FRAME, "KeyboardInterrupt"], []),
    "words-before": (["saving", *INTERRUPT], ["saving"]),
    "words-after": ([*INTERRUPT, "saved"], ["saved"]),
    "words-between": ([*INTERRUPT, "saved", *WORKER, "bye"], ["saved", "bye"]),
    "words-after-a-verdict": ([*INTERRUPT_IN_JOB, "saved"], ["saved"]),
    "own-error": (VALUE, VALUE),
    "own-error-in-finally": (
        [*INTERRUPT, *CHAIN, *VALUE],
        [*INTERRUPT, *CHAIN, *VALUE],
    ),
    "interrupt-while-handling": ([*VALUE, *CHAIN, *INTERRUPT], []),
    "crash": (CRASH, CRASH),
    "speaks-of-it": (["KeyboardInterrupt"], ["KeyboardInterrupt"]),
}


@pytest.mark.parametrize(("written", "seen"), ENDINGS.values(), ids=ENDINGS)
def test_what_is_seen_of_a_rank_that_was_told_to_end(written: list[str], seen: list[str]) -> None:
    screen = Screen()
    screen.bid()
    screen.write(0, *written)
    screen.end(0, 1)
    assert screen.of(0) == seen
    screen.tracebacks.settle()
    assert screen.of(0) == seen


@pytest.mark.parametrize("error", [INTERRUPT, PEER, WRAPPED_PEER, VALUE, CRASH, WORKER])
def test_all_is_seen_of_a_rank_that_nobody_told_to_end(error: list[str]) -> None:
    screen = Screen()
    screen.write(0, "before", *error)
    screen.end(0, 0)
    screen.tracebacks.settle()
    assert screen.of(0) == ["before", *error]


def test_each_rank_that_is_told_to_end_may_have_an_error_of_its_own() -> None:
    screen = Screen()
    screen.bid()
    for number in (0, 1):
        screen.write(number, *VALUE)
    for number in (1, 0):
        screen.end(number, 1)
    assert (screen.of(0), screen.of(1)) == (VALUE, VALUE)


def test_an_error_is_shown_once_and_its_echoes_never() -> None:
    screen = Screen()
    screen.write(1, *VALUE)
    screen.write(0, *PEER)
    screen.write(2, *VALUE)
    screen.end(1, 1)
    screen.end(0, 1)
    screen.end(2, 1)
    screen.wait(2 * HOLD_S)
    screen.tracebacks.settle()
    assert screen.shown == [(1, line) for line in VALUE]


def test_an_echo_that_comes_before_the_failure_is_left_out() -> None:
    """Of a rank that dies without a word the others know first."""
    screen = Screen()
    screen.write(0, *PEER)
    screen.write(2, *PEER)
    screen.wait(1.0)
    screen.end(1, 9)
    screen.end(0, 1)
    screen.end(2, 1)
    screen.tracebacks.settle()
    assert screen.shown == []


def test_an_echo_is_left_out_however_long_the_rank_that_failed_takes_to_end() -> None:
    screen = Screen()
    screen.tracebacks.note_failure(1)
    screen.write(0, *PEER)
    screen.write(1, *VALUE)
    screen.wait(3 * HOLD_S)
    assert screen.shown == [(1, line) for line in VALUE]
    screen.end(1, 1)
    screen.end(0, 1)
    screen.tracebacks.settle()
    assert screen.shown == [(1, line) for line in VALUE]


def test_where_all_tell_that_they_fail_one_of_them_is_seen() -> None:
    screen = Screen()
    for number in (0, 1):
        screen.tracebacks.note_failure(number)
    for number in (0, 1):
        screen.write(number, *VALUE)
        screen.wait(0.5)
    screen.end(1, 1)
    screen.end(0, 1)
    screen.tracebacks.settle()
    assert screen.shown == [(0, line) for line in VALUE]


def test_ranks_that_are_told_to_end_after_a_failure_say_what_they_did() -> None:
    screen = Screen()
    screen.write(1, *VALUE)
    screen.end(1, 1)
    screen.bid()
    screen.write(0, "saved", *INTERRUPT)
    screen.end(0, 1)
    screen.tracebacks.settle()
    assert screen.of(0) == ["saved"]


def test_what_began_before_the_order_to_end_is_an_echo() -> None:
    """All ranks fail alike: one of them is enough."""
    screen = Screen()
    screen.write(0, *VALUE)
    screen.write(1, *VALUE[:2])
    screen.end(0, 1)
    screen.bid()
    screen.write(1, *VALUE[2:])
    screen.end(1, 1)
    screen.tracebacks.settle()
    assert (screen.of(0), screen.of(1)) == (VALUE, [])


def test_what_comes_after_a_silent_failure_is_an_echo() -> None:
    """Without hvdtrain.init() a rank may complain of another in words of its own."""
    screen = Screen()
    screen.end(1, 9)
    screen.write(0, *VALUE)
    screen.end(0, 1)
    screen.tracebacks.settle()
    assert screen.shown == []


def test_a_traceback_is_shown_when_it_is_complete() -> None:
    screen = Screen()
    screen.write(0, *VALUE[:2])
    screen.wait(1.0)
    assert screen.shown == [], "its source comes from a slow file system"
    screen.write(0, *VALUE[2:])
    screen.wait(0.2)
    assert screen.shown == [], "a chained one may follow"
    screen.wait(0.1)
    assert screen.of(0) == VALUE


def test_a_traceback_that_never_ends_is_shown_after_all() -> None:
    screen = Screen()
    screen.write(0, *VALUE[:2])
    for _ in range(25):
        screen.write(0, "  more")
        screen.wait(0.1)
    assert screen.of(0)[:2] == VALUE[:2]


def test_the_wait_for_a_failure_ends() -> None:
    """A program may print a traceback and go on."""
    screen = Screen()
    screen.write(0, *VALUE)
    screen.wait(0.5)
    assert screen.of(0) == VALUE, "nobody else is in trouble"
    screen.write(1, *VALUE)
    screen.write(2, "all is well")
    assert screen.of(2) == ["all is well"], "only what has a traceback waits"
    screen.wait(0.5)
    assert screen.of(1) == []
    screen.wait(HOLD_S - 0.6)
    assert screen.of(1) == []
    screen.wait(0.2)
    assert screen.of(1) == VALUE
    screen.write(2, *VALUE)
    screen.wait(0.5)
    assert screen.of(2) == ["all is well", *VALUE], "that trouble is over"
