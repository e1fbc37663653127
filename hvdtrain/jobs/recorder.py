"""Records a job in its folder, without blocking the launcher.

If the disk is full or slow, or its server does not answer, the job continues. Data that can't be
written yet is kept in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.agent.backlog import Backlog
from hvdtrain.jobs.files import append_json_line
from hvdtrain.jobs.folder import HEARTBEAT_S, JobFolder
from hvdtrain.jobs.log import LAUNCHER, LogLine, LogWriter
from hvdtrain.jobs.state import JobState, own_identity
from hvdtrain.launch.observer import (
    AttemptBegan,
    AttemptEnded,
    CheckpointSaved,
    Event,
    JobEnded,
    Observer,
    Progress,
    RankLost,
    RankTable,
    Restarting,
    Summary,
)
from hvdtrain.text import plural

__all__ = ["JobRecorder", "RollUp", "spread"]

INTERVAL_S = 0.2
# At its end, a job waits this long for a disk that makes no progress.
CLOSE_TIMEOUT_S = 10.0
MOST_RECORDS = 10_000
# A roll-up keeps the spread of measurements, the median of counters, and the newest value of
# everything else, such as the slow rank.
_MEASUREMENTS = ("loss", "own_s", "reduced_bytes_per_s")
_COUNTERS = ("step", "epoch", "samples")


class JobRecorder(Observer):
    """Writes the folder of one job. All methods must be called from the same thread.

    The recorder also watches the folder for requests to stop the job. On a request, it sends this
    process SIGTERM, or SIGUSR1 if the ranks should save a checkpoint first.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        # A restarted job continues to count its attempts.
        before = folder.read_state() or JobState(phase="queued")
        self._state = JobState(
            phase="running",
            launcher=own_identity(),
            since_s=time.time(),
            attempt=before.attempt,
        )
        self._lock = threading.Lock()
        self._lines: Backlog[LogLine] = Backlog()
        self._records: deque[tuple[Path, Mapping[str, Any]]] = deque()
        self._roll_ups = {path: RollUp(span_s) for span_s, path in folder.roll_ups.items()}
        self._unwritten: JobState | None = None
        self._written = 0
        self._log: LogWriter | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-job", daemon=True)
        self._thread.start()

    def line(self, rank: int, stream: str, text: str) -> None:
        """Record a line of rank ``rank``, or of the launcher if ``rank`` is ``LAUNCHER``."""
        self._lines.put(_line(rank, stream, text), len(text))

    @property
    def holds_up(self) -> bool:
        """Whether ranks should pause until more of their lines are written."""
        return self._lines.should_pause

    def notice(self, text: str) -> None:
        """Record a message of the launcher."""
        for line in text.splitlines():
            self.line(LAUNCHER, "stderr", line)

    def on_event(self, event: Event) -> None:
        """Record an event of the launcher."""
        match event:
            case AttemptBegan():
                began = {"attempt": self._state.attempt + 1, **_fields(event, "ranks", "hosts")}
                self.update_state(
                    phase="running", mpi=event.mpi, code=None, cause="", verdict="", **began
                )
                self.record_event("began", **began)
            case AttemptEnded():
                self.record_event("ended", attempt=self._state.attempt, **_fields(event))
            case RankLost():
                self.record_event("loss", **_fields(event))
            case CheckpointSaved():
                self.record_event("checkpoint", step=event.step)
                self.update_state(saved=event.step)
            case Progress():
                self.update_state(**_fields(event, "step", "epoch", "total_steps"))
                self.record_metrics(**_metrics(event))
            case RankTable():
                self._record(self._folder.ranks, event.columns)
            case Restarting():
                self.update_state(phase="restarting")
            case Summary():
                self.record_event(
                    "summary", **{name: round(x, 4) for name, x in event.shares.items()}
                )
            case JobEnded():
                self.update_state(phase="ended", **_fields(event))

    def record_event(self, kind: str, **fields: Any) -> None:
        """Append a row to ``events.jsonl``."""
        self._record(self._folder.events, {"kind": kind, **fields})

    def record_metrics(self, **fields: Any) -> None:
        """Append a row to ``metrics.jsonl``, and one to each roll-up whose interval is complete."""
        row = self._record(self._folder.metrics, fields)
        for path, roll_up in self._roll_ups.items():
            if (completed := roll_up.add(row)) is not None:
                self._record(path, completed)

    def update_state(self, **changes: Any) -> None:
        """Change fields of the ``JobState``."""
        if changes.get("phase", self._state.phase) != self._state.phase:
            changes = {"since_s": time.time(), **changes}
        self._state = dataclasses.replace(self._state, **changes)
        with self._lock:
            self._unwritten = self._state

    def close(self) -> None:
        """Write all remaining data. Give up if the disk makes no progress."""
        for path, roll_up in self._roll_ups.items():
            if (row := roll_up.end()) is not None:
                self._record(path, row)
        self._closing.set()
        written = -1
        while self._thread.is_alive() and self._written != written:
            written = self._written
            self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def _record(self, path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Queue a row for a file, with the current time if it has none, and return the row."""
        row = {"time": round(time.time(), 3), **content}
        with self._lock:
            if len(self._records) < MOST_RECORDS:
                self._records.append((path, row))
        return row

    def _run(self) -> None:
        folder, touched_at = self._folder, time.monotonic()
        while True:
            closing = self._closing.wait(INTERVAL_S)
            # The state is written last, so that a reader that sees the end of the job finds
            # everything else too.
            for write in (self._write_lines, self._write_records, self._write_state):
                with contextlib.suppress(OSError):
                    write()
            if closing:
                # A stop request that arrives now is meant for the job's next run.
                break
            with contextlib.suppress(OSError):
                if time.monotonic() - touched_at > HEARTBEAT_S:
                    touched_at = time.monotonic()
                    folder.touch_state()
                if (number := folder.take_stop_request()) is not None:
                    os.kill(os.getpid(), number)
        if self._log is not None:
            self._log.close()

    def _write_lines(self) -> None:
        self._log = self._log or LogWriter(self._folder.log)
        # Ranks that print continuously must not delay the other files.
        until = time.monotonic() + HEARTBEAT_S / 10
        while not self._lines.is_empty and (self._closing.is_set() or time.monotonic() < until):
            dropped, lines = self._lines.take()
            text = f"{plural(dropped, 'line')} could not be written to this log"
            gap = [_line(LAUNCHER, "stderr", text)] if dropped else []
            try:
                self._log.append([*gap, *lines])
            except OSError:
                self._lines.put_back(dropped, [(line, len(line.text)) for line in lines])
                raise
            self._written += len(lines)

    def _write_records(self) -> None:
        while self._records:
            path, content = self._records[0]
            append_json_line(path, content)
            with self._lock:
                self._records.popleft()

    def _write_state(self) -> None:
        with self._lock:
            state, self._unwritten = self._unwritten, None
        if state is None:
            return
        try:
            self._folder.write_state(state)
        except OSError:
            with self._lock:
                self._unwritten = self._unwritten or state
            raise


def _line(rank: int, stream: str, text: str) -> LogLine:
    return LogLine(time_s=time.time(), rank=rank, stream=stream, text=text)


def _fields(event: Event, *names: str) -> dict[str, Any]:
    """Return the fields of an event that ``names`` lists, or all fields if it lists none."""
    return {name: getattr(event, name) for name in names or event.__dataclass_fields__}


def _metrics(progress: Progress) -> dict[str, Any]:
    """Return a row of ``metrics.jsonl`` with the known values."""
    own_s: dict[str, Any] = {}
    if progress.own_s:
        own_s = spread("own_s", [{"own_s": round(seconds, 6)} for seconds in progress.own_s])
    rank, factor, host = progress.slow or (None, None, None)
    row = {
        **_fields(progress, "step", "epoch"),
        **(own_s if len(progress.own_s) > 1 else {"own_s": own_s.get("own_s")}),
        "reduced_bytes_per_s": progress.reduced_bytes_per_s or None,
        "slow": rank,
        "slow_factor": factor,
        "slow_host": host,
        **_fields(progress, "samples", "loss"),
        "held_by": progress.held_by or None,
    }
    return {name: value for name, value in row.items() if value is not None}


def spread(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median, minimum, 95th percentile and maximum over all rows.

    Each row has either a single value or a spread. For the name ``own_s``, the keys of the spread
    are ``own_s``, ``own_s_min``, ``own_s_p95`` and ``own_s_max``.
    """
    low, high, most = (
        [row.get(f"{name}_{part}", row[name]) for row in rows] for part in ("min", "p95", "max")
    )
    return {
        f"{name}_min": min(low),
        name: statistics.median(row[name] for row in rows),
        # The nearest-rank percentile is one of the values. Of fewer than twenty values, it is the
        # largest one.
        f"{name}_p95": sorted(high)[-(-len(high) * 95 // 100) - 1],
        f"{name}_max": max(most),
    }


class RollUp:
    """Aggregates the rows of each interval into one row."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._rows: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Add a row with a ``time``. If it begins an interval, return the previous one's row."""
        spans = {one["time"] // self._span_s for one in [*self._rows[:1], row]}
        completed = self.end() if len(spans) > 1 else None
        self._rows.append(row)
        return completed

    def end(self) -> dict[str, Any] | None:
        """Return the aggregated row of the current interval; None if the interval is empty."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        rolled = {**rows[-1], "time": round(statistics.fmean(row["time"] for row in rows), 3)}
        for name in _COUNTERS:
            if counts := [row[name] for row in rows if name in row]:
                # Like the row's time, the median of a counter is from the middle of the interval.
                rolled[name] = statistics.median_low(counts)
        for name in _MEASUREMENTS:
            if measured := [row for row in rows if name in row]:
                parts = spread(name, measured)
                rolled |= {part: float(f"{value:.6g}") for part, value in parts.items()}
        return rolled
