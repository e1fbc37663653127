"""Makes a job's folder here of the records that its pods print; see ``records``.

What was written is noted behind it: what a reader that was killed had not noted yet is cut off, and
written again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.jobs.files import append_json_line, try_lock, write_json
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.log import (
    LAUNCHER,
    LogLine,
    LogWriter,
    log_end,
    parse_line,
    segment_path,
    segments,
)
from hvdtrain.jobs.state import JobState, state_from_json

__all__ = ["Mirror", "Position", "opened"]

# How long what was read stands for what there is.
FRESH_S = 0.7
_POSITION = "mirror.json"
_LOCK = "mirror.lock"
# Nodes keep so much of what a pod has printed.
_LOST = "some of what this job said is not here: nodes keep 10 MiB of what a pod prints"
_BATCH = 2_000


@dataclass(frozen=True, kw_only=True)
class Position:
    """Up to where records were written.

    Attributes:
        pod: Whose records; the uid of a launcher's pod, empty for none yet.
        number: How many of them.
        since: The node's time of the last, as Kubernetes writes it; empty for none.
        log_end: How long the log is.
        sizes: How long the files of rows are.
    """

    pod: str = ""
    number: int = 0
    since: str = ""
    log_end: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)


class Mirror:
    """A folder, and up to where it was written; made by ``opened``, which keeps others out."""

    def __init__(self, job: JobFolder) -> None:
        self._job = job
        self._files = {
            path.name: path for path in (job.events, job.metrics, *job.roll_ups.values(), job.ranks)
        }
        self.position = _read(job.path / _POSITION)
        self._cut()

    def write(self, pod: str, text: str) -> None:
        """Write what is new in the records of a pod.

        Args:
            pod: The uid of the pod.
            text: What it has printed, a record a line behind the node's time.

        Raises:
            OSError: It can't be written.
        """
        number = self.position.number if pod == self.position.pod else 0
        since = self.position.since if pod == self.position.pod else ""
        lines: list[LogLine] = []
        state: JobState | None = None
        heard_s = 0.0
        for at, record in _records(text):
            if record["n"] < number:
                continue
            if record["n"] > number:
                lines.append(_own_line(_LOST))
            number, since = record["n"] + 1, at
            if (line := parse_line(str(record.get("line", "")).encode())) is not None:
                lines.append(line)
            elif (path := self._files.get(str(record.get("to")))) is not None:
                append_json_line(path, record["row"])
            elif "state" in record:
                state, heard_s = state_from_json(record["state"]), float(record["heard_s"])
        if (pod, number) == (self.position.pod, self.position.number):
            return
        if lines:
            with contextlib.closing(LogWriter(self._job.log)) as log:
                for begin in range(0, len(lines), _BATCH):
                    log.append(lines[begin : begin + _BATCH])
        sizes = {name: _size(path) for name, path in self._files.items()}
        self.position = Position(
            pod=pod, number=number, since=since, log_end=log_end(self._job.log), sizes=sizes
        )
        write_json(self._job.path / _POSITION, dataclasses.asdict(self.position))
        if state is not None:
            # Last: who reads of an end finds all that was before it.
            self._job.write_state(state)
            self._job.touch_state(min(heard_s, time.time()))

    def _cut(self) -> None:
        """Cut off what was written and not noted."""
        for name, path in self._files.items():
            _shorten(path, self.position.sizes.get(name, 0))
        end = self.position.log_end
        for begin in segments(self._job.log):
            path = segment_path(self._job.log, begin)
            if begin > end:
                path.unlink(missing_ok=True)
                path.with_suffix(".idx").unlink(missing_ok=True)
            else:
                _shorten(path, end - begin)


@contextlib.contextmanager
def opened(job: JobFolder) -> Iterator[Mirror | None]:
    """The mirror in a job's folder; None where another process is at it, or was just now.

    Raises:
        OSError: It can't be opened.
    """
    with try_lock(job.path / _LOCK) as lock:
        if lock is None:
            yield None
            return
        about = os.fstat(lock)
        if 0 <= time.time() - about.st_mtime < FRESH_S and about.st_size:
            yield None
            return
        yield Mirror(job)
        # Touched, and no longer new.
        os.pwrite(lock, b"\n", 0)


def _records(text: str) -> Iterable[tuple[str, dict[str, Any]]]:
    for line in text.splitlines():
        at, _, content = line.partition(" ")
        try:
            record = json.loads(content)
        except ValueError:
            # What Python or a library says itself, or the end of what was cut off.
            continue
        if isinstance(record, dict) and isinstance(record.get("n"), int):
            yield at, record


def _own_line(text: str) -> LogLine:
    return LogLine(time_s=time.time(), rank=LAUNCHER, stream="stderr", text=text)


def _read(path: Path) -> Position:
    try:
        return Position(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Position()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _shorten(path: Path, size: int) -> None:
    if _size(path) > max(0, size):
        os.truncate(path, max(0, size))
