"""Bounded buffers for output to a terminal, pipe or disk that may be slow, stopped or full."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["BackgroundWriter", "Backlog"]

# At this size, ranks should pause, but at most for PAUSE_S. If a rank blocked in print() for
# longer, the others would time out.
PAUSE_BYTES = 8 << 20
PAUSE_S = 5.0
# Beyond this size the oldest items are dropped.
MAX_BYTES = 4 * PAUSE_BYTES
# Python's overhead per item.
ITEM_BYTES = 100
BLOCK_BYTES = 1 << 16
RETRY_S = 0.5
POLL_S = 0.02

_Item = TypeVar("_Item")


class Backlog(Generic[_Item]):
    """A bounded queue between a thread that adds items and a thread that writes the items."""

    def __init__(self) -> None:
        self._added = threading.Condition()
        self._items: deque[tuple[_Item, int, int]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._full_since: float | None = None

    def put(self, item: _Item, size: int, *, lines: int = 1) -> None:
        """Add an item of ``size`` bytes and ``lines`` lines. If it is full, drop the oldest."""
        with self._added:
            self._items.append((item, size + ITEM_BYTES, lines))
            self._bytes += size + ITEM_BYTES
            while self._bytes > MAX_BYTES and len(self._items) > 1:
                _, dropped_bytes, dropped_lines = self._items.popleft()
                self._bytes -= dropped_bytes
                self._dropped += dropped_lines
            if self._full_since is None and self._bytes >= PAUSE_BYTES:
                self._full_since = time.monotonic()
            self._added.notify()

    def take(self, max_bytes: int = BLOCK_BYTES) -> tuple[int, list[_Item]]:
        """Remove the oldest items, up to a block of about ``max_bytes``.

        Returns:
            The number of lines that were dropped before these items, and the items.
        """
        with self._added:
            items: list[_Item] = []
            taken_bytes = 0
            while self._items and taken_bytes < max_bytes:
                item, size, _ = self._items.popleft()
                items.append(item)
                taken_bytes += size
            self._bytes -= taken_bytes
            if self._bytes < PAUSE_BYTES // 2:
                self._full_since = None
            dropped, self._dropped = self._dropped, 0
            return dropped, items

    def put_back(self, dropped: int, items: Sequence[tuple[_Item, int]]) -> None:
        """Put items back at the front of the queue after a failed write.

        ``dropped``, which is a number of lines, and ``items`` come from ``take``. Each item must be
        a single line, and comes with its size in bytes.
        """
        with self._added:
            self._items.extendleft((item, size + ITEM_BYTES, 1) for item, size in reversed(items))
            self._bytes += sum(size + ITEM_BYTES for _, size in items)
            self._dropped += dropped

    def wait(self, timeout_s: float) -> None:
        """Wait until the queue contains an item, for at most ``timeout_s`` seconds."""
        with self._added:
            self._added.wait_for(lambda: self._items, timeout_s)

    @property
    def is_empty(self) -> bool:
        """Whether all items have been taken."""
        return not self._items

    @property
    def should_pause(self) -> bool:
        """Whether ranks should pause until part of the backlog is written."""
        full_since = self._full_since
        return full_since is not None and time.monotonic() - full_since < PAUSE_S


class BackgroundWriter:
    """Writes to a file descriptor in a thread, so that ``write`` never blocks.

    Args:
        descriptor: The file descriptor, which stays open.
        gap: Function that receives the number of dropped lines, and returns a line to write in
            their place.
        fails: Function that is called in the thread with each write error, and returns whether to
            retry. If it returns False, all further output is discarded.
    """

    def __init__(
        self, descriptor: int, *, gap: Callable[[int], bytes], fails: Callable[[OSError], bool]
    ) -> None:
        self._descriptor = descriptor
        self._gap = gap
        self._fails = fails
        self._backlog: Backlog[bytes] = Backlog()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_writing = False
        self._is_broken = False
        self._written = 0

    def write(self, data: bytes) -> None:
        """Queue a line, or text that redraws a status line. It is written or dropped as a whole."""
        if self._is_broken:
            return
        if self._thread is None:
            # The constructor does not start the thread, because agents fork after they create the
            # writer.
            self._thread = threading.Thread(target=self._run, name="hvdtrain-output", daemon=True)
            self._thread.start()
        self._backlog.put(data, len(data), lines=int(data.endswith(b"\n")))

    @property
    def should_pause(self) -> bool:
        """Whether ranks should pause until part of the output is written."""
        return self._backlog.should_pause and not self._is_broken

    def close(self, patience_s: float, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until everything is written.

        Give up if nothing is written for ``patience_s`` seconds, or if ``give_up()`` returns true.
        """
        written, since = self._written, time.monotonic()
        while not self._is_idle() and not give_up():
            if self._written != written:
                written, since = self._written, time.monotonic()
            elif time.monotonic() - since > patience_s:
                break
            time.sleep(POLL_S)
        self._is_closed = True

    def _is_idle(self) -> bool:
        # The order matters, because the thread sets _is_writing before it empties the backlog.
        return self._is_broken or (self._backlog.is_empty and not self._is_writing)

    def _run(self) -> None:
        while not self._is_closed and not self._is_broken:
            self._backlog.wait(RETRY_S)
            self._is_writing = True
            dropped, pieces = self._backlog.take()
            if dropped:
                pieces.insert(0, self._gap(dropped))
            self._write(b"".join(pieces))
            self._is_writing = False

    def _write(self, data: bytes) -> None:
        while data and not self._is_broken:
            try:
                size = os.write(self._descriptor, data)
            except BlockingIOError:
                # Another process has made this terminal or pipe non-blocking.
                select.select([], [self._descriptor], [], RETRY_S)
            except OSError as error:
                if self._fails(error):
                    time.sleep(RETRY_S)
                else:
                    self._is_broken = True
            else:
                data = data[size:]
                self._written += size
