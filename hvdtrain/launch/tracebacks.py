"""A filter of tracebacks: hides those that only follow from an order to end or another failure.

A rank that is told to end by Ctrl-C dies of KeyboardInterrupt, and when one fails the others
complain about it. On many ranks that would bury the one thing that matters. Nothing is lost: the
files of ``--output-dir`` are written before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvdtrain.launch.failure import RankExit
from hvdtrain.launch.stderr_text import begins_traceback, exception_name

__all__ = ["HOLD_S", "Author", "TracebackFilter"]

# What may follow from another rank's failure waits that long for it. Python may take its time to
# exit: hvdtrain.collectives.exit_hooks grants it 5 s.
HOLD_S = 8.0
# After its last line a traceback may go on: with the exception that it led to, or a message of
# several lines.
SILENCE_S = 0.25
# The source lines in a traceback may come from a slow file system.
MOST_S = 2.0
# Python's words for an exception that it can't raise; a traceback is to come.
_HEADING = re.compile(
    r"Exception ignored (?:in|on)\b|Exception in thread |Process \S+:$|Error in sys\.excepthook:"
    r"|Original exception was:"
)
_GOES_ON = (
    "During handling of the above exception",
    "The above exception was the direct cause",
    "hvdtrain: rank ",
)
_INTERRUPT = "KeyboardInterrupt"
_PEER = "PeerFailedError"
# It has no message, so what comes next is not part of one.
_INTERRUPTED = re.compile(r"(?:hvdtrain: rank \d+ of \d+ failed: )?KeyboardInterrupt:?\s*$")


class Author(Protocol):
    """The rank that writes: its number, whether it was told to end, and how it ended, if it has."""

    number: int
    was_signalled: bool
    end: RankExit | None


@dataclass(eq=False)
class _Block:
    """One traceback, with those that it is chained to."""

    author: Author
    was_signalled: bool
    began_at: float
    changed_at: float = 0.0
    lines: list[str] = field(default_factory=list)

    def takes(self, line: str) -> bool:
        """Whether ``line``, which comes next, belongs to it, too."""
        last = next((one for one in reversed(self.lines) if one.strip()), "")
        if not _INTERRUPTED.match(last):
            return True
        return not line.strip() or line.startswith((" ", *_GOES_ON)) or _begins(line)

    def is_over(self, now: float) -> bool:
        silence_s = SILENCE_S if exception_name(self.lines) else MOST_S
        return (
            self.author.end is not None
            or now - self.changed_at > silence_s
            or now - self.began_at > MOST_S
        )


class TracebackFilter:
    """Takes tracebacks out of the ranks' stderr, and shows those that stand for themselves.

    Args:
        ends: The ends of ranks; watched, as it grows.
        show: Prints a line of a rank after all.
        hold_s: How long a rank may take to fail after its traceback.
        clock: Gives seconds.
    """

    def __init__(
        self,
        ends: Sequence[RankExit],
        show: Callable[[int, str], None],
        *,
        hold_s: float = HOLD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ends = ends
        self._failed: set[int] = set()
        self._show = show
        self._hold_s = hold_s
        self._clock = clock
        self._open: dict[int, _Block] = {}
        self._held: list[_Block] = []
        self._failing: tuple[int, float] | None = None

    def take(self, author: Author, line: str) -> bool:
        """Take ``line`` if it belongs to a traceback, and return whether; if not, show it now."""
        now = self._clock()
        block = self._open.get(author.number)
        if block is not None and not block.takes(line):
            self._judge(self._open.pop(author.number), now)
            block = None
        if block is None:
            if not _begins(line):
                return False
            block = self._open[author.number] = _Block(author, author.was_signalled, now)
        block.lines.append(line)
        block.changed_at = now
        return True

    def note_failure(self, number: int) -> None:
        """Note that a rank told of a failure of its own; it may end later than ``hold_s`` after."""
        self._failed.add(number)

    def review(self) -> None:
        """Judge what is complete, and give up waiting for a failure; to be called often."""
        now = self._clock()
        for number, block in list(self._open.items()):
            if block.is_over(now):
                self._judge(self._open.pop(number), now)
        if not self._failed and not self._others_failed():
            self._release([block for block in self._held if now - block.changed_at > self._hold_s])

    def settle(self) -> None:
        """Show what is held, unless a rank has failed; for the end of the job."""
        now = self._clock()
        for number in list(self._open):
            self._judge(self._open.pop(number), now)
        if not self._failed and not self._others_failed():
            self._release(self._held[:])

    def _judge(self, block: _Block, now: float) -> None:
        """Show, hold or drop a traceback that is complete."""
        number = block.author.number
        name = exception_name(block.lines)
        if block.author.was_signalled and (
            name in (_INTERRUPT, _PEER) or _wraps_interrupt(block.lines)
        ):
            return
        if self._failing is not None and now > self._failing[1]:
            self._failing = None
        another_fails = self._failing is not None and self._failing[0] != number
        echoes = name == _PEER or another_fails or self._others_failed(number)
        # What a rank raises after it was told to end is its own, such as a file that can't be
        # written.
        if echoes and not block.was_signalled:
            self._held.append(block)
            return
        if self._failing is None:
            self._failing = (number, now + self._hold_s)
        self._release([block])

    def _others_failed(self, number: int | None = None) -> bool:
        return any(end.code != 0 and end.rank != number for end in self._ends)

    def _release(self, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            if block in self._held:
                self._held.remove(block)
            for line in block.lines:
                self._show(block.author.number, line)


def _wraps_interrupt(lines: Sequence[str]) -> bool:
    """Whether the last exception tells of KeyboardInterrupt: TensorFlow wraps it in its own."""
    last = max((number for number, line in enumerate(lines) if _begins(line)), default=0)
    return any(_INTERRUPT in line for line in lines[last:])


def _begins(line: str) -> bool:
    return begins_traceback(line) or _HEADING.match(line) is not None
