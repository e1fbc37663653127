"""The timeline of this rank's collectives, for Perfetto or chrome://tracing.

The format is Chrome's trace format: a JSON array of events. The end of the array may be missing.
See https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
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

__all__ = ["Timeline", "timeline_file"]


class Timeline:
    """Writes each operation as soon as it ends, so that the file is usable if the rank is killed.

    Times are from the host's clock, so timelines of different hosts are only aligned as well as
    the hosts' clocks are.

    ``file`` is replaced. If it can't be written, a warning is logged.
    """

    def __init__(self, file: Path, rank: int) -> None:
        self._rank = rank
        self._clock_s = time.time() - time.monotonic()
        self._journal = Journal(file, "the timeline", "--timeline-filename", mode="w")
        name = f"rank {rank} on {socket.gethostname()}, process {os.getpid()}"
        self._write("[\n", ph="M", name="process_name", args={"name": name})
        self._write(ph="M", name="process_sort_index", args={"sort_index": rank})

    def note(self, done: FinishedOperation) -> None:
        """Write an operation that has ended."""
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
        """End the array and close the file."""
        self._journal.write("\n]\n")
        self._journal.close()

    def _write(self, separator: str = ",\n", **event: Any) -> None:
        entry = json.dumps({"pid": self._rank, "tid": 0, **event})
        self._journal.write(separator + entry, flush=True)


def timeline_file(pattern: str, rank: int) -> Path | None:
    """Return the file of a rank. If the pattern lacks ``{rank}``, only rank 0 has a file."""
    if "{rank}" in pattern:
        return Path(pattern.replace("{rank}", str(rank)))
    return Path(pattern) if rank == 0 else None
