"""The timeline of this rank's operations between ranks, for Perfetto or chrome://tracing.

The format is that of Chrome's traces, an array of events of which the end may be missing:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from hvdtrain.collectives.engine_core import FinishedOperation
from hvdtrain.monitor.journal import Journal

__all__ = ["Timeline", "file_of"]


class Timeline:
    """Writes each operation as soon as it ends: what a killed rank did before is there.

    Times are those of the host's clock, so that files of several ranks fit together as well as
    their clocks do.

    Args:
        file: Written anew; folders above it are made. When it can't be written that is told, and
            training goes on.
        rank: Whose operations.
    """

    def __init__(self, file: Path, rank: int) -> None:
        self._rank = rank
        self._clock_s = time.time() - time.monotonic()
        self._journal = Journal(file, "the timeline", "--timeline-filename", mode="w")
        where = f"rank {rank} on {socket.gethostname()}, process {os.getpid()}"
        self._write("[\n", ph="M", name="process_name", args={"name": where})
        self._write(ph="M", name="process_sort_index", args={"sort_index": rank})

    def note(self, done: FinishedOperation) -> None:
        """Write one operation."""
        args: dict[str, Any] = {"call": done.call, "waited_ms": round(done.waited_s * 1e3, 3)}
        if done.error:
            args["error"] = done.error
        self._write(
            ph="X",
            name=done.title,
            ts=round((self._clock_s + done.start_s) * 1e6, 1),
            dur=round((done.stop_s - done.start_s) * 1e6, 1),
            args=args,
        )

    def close(self) -> None:
        """End the file."""
        self._journal.write("\n]\n")
        self._journal.close()

    def _write(self, before: str = ",\n", **event: Any) -> None:
        entry = json.dumps({"pid": self._rank, "tid": 0, **event})
        self._journal.write(before + entry, now=True)


def file_of(pattern: str, rank: int) -> Path | None:
    """Return a rank's file: each has one where ``{rank}`` is in the name, else rank 0 alone."""
    if "{rank}" in pattern:
        return Path(pattern.replace("{rank}", str(rank)))
    return Path(pattern) if rank == 0 else None
