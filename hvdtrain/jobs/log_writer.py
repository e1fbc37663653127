"""Writes a job's log: segments that are capped, each with an index."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.jobs.json_lines import append_json_line, append_whole
from hvdtrain.jobs.log_format import (
    BLOCK_BYTES,
    Block,
    LogLine,
    format_line,
    segment_path,
    segments,
)

__all__ = ["LogWriter"]

SEGMENT_BYTES = 4 << 20
HEAD_BYTES = 16 << 20
TAIL_BYTES = 256 << 20


class LogWriter:
    """The one writer of a log; one that is there already is gone on with.

    Args:
        folder: Where segments lie; made if it isn't there.
        segment_bytes: About how long a segment gets.
        head_bytes: So much of the beginning is kept whatever comes.
        tail_bytes: So much of the end is kept.

    Raises:
        OSError: The folder can't be made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        head_bytes: int = HEAD_BYTES,
        tail_bytes: int = TAIL_BYTES,
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        known = segments(folder)
        self._segment = known[-1] if known else 0
        self._descriptor = self._open()
        self._end = self._segment + os.fstat(self._descriptor).st_size
        self._block_begin = self._end
        self._block_time_s = 0.0
        self._block_ranks: set[int] = set()

    def append(self, lines: Sequence[LogLine]) -> None:
        """Add lines, as a whole or not at all.

        Raises:
            OSError: They can't be written, for instance because the disk is full.
        """
        if not lines:
            return
        if self._end - self._segment >= self._segment_bytes:
            self._next_segment()
        size = append_whole(self._descriptor, b"".join(map(format_line, lines)))
        if not self._block_ranks:
            self._block_time_s = lines[0].time_s
        self._block_ranks.update(line.rank for line in lines)
        self._end = self._segment + size
        if self._end - self._block_begin >= BLOCK_BYTES:
            self._end_block()

    def close(self) -> None:
        """Close the files."""
        self._end_block()
        os.close(self._descriptor)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(segment_path(self._folder, self._segment), flags, 0o600)

    def _next_segment(self) -> None:
        self._end_block()
        before, self._segment = self._segment, self._end
        try:
            descriptor = self._open()
        except OSError:
            self._segment = before
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._remove_middle()

    def _end_block(self) -> None:
        if not self._block_ranks:
            return
        ranks = [range(rank, rank + 1) for rank in sorted(self._block_ranks)]
        block = Block(
            begin=self._block_begin, end=self._end, time_s=self._block_time_s, ranks=ranks
        )
        # What is in no index is found all the same.
        with contextlib.suppress(OSError):
            index = segment_path(self._folder, self._segment).with_suffix(".idx")
            append_json_line(index, block.to_json())
        self._block_begin = self._end
        self._block_ranks.clear()

    def _remove_middle(self) -> None:
        known = segments(self._folder)
        for begin, end in itertools.pairwise(known):
            if begin >= self._head_bytes and end <= self._end - self._tail_bytes:
                path = segment_path(self._folder, begin)
                path.unlink(missing_ok=True)
                path.with_suffix(".idx").unlink(missing_ok=True)
