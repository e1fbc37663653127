"""Runs beside the launcher where no volume has the job's folder: prints what is written there.

Each line of its output is a JSON object, a record, with a number that counts up from 0 and one of:

- ``line``: a line of the log, as it lies there;
- ``to`` and ``row``: a row for a file of rows, by its name;
- ``state``: the state of the job; ``heard_s``: when its launcher said so, in seconds since 1970.

``hvdtrain.jobs.kubernetes.mirror`` makes the folder of it that readers of jobs know.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder
from hvdtrain.jobs.kubernetes.manifests import RECORDS_FOLDER
from hvdtrain.jobs.log import format_line, read_log

__all__ = ["Records", "hold_own", "main"]

POLL_S = 0.5
# The launcher's container starts beside this one. Where it has not come by then it never will, as
# one without hvdtrain; and as long as this one runs, Kubernetes takes the pod for running.
START_S = 120.0
# Of the rows that tell of each rank one is printed in this time: they are long.
RANKS_INTERVAL_S = 10.0
_LOCK = "launcher.lock"


def hold_own(environ: Mapping[str, str]) -> int | None:
    """Let who prints the records know that there may be more as long as this process lives.

    Returns:
        A file descriptor, to be kept open; None where nobody prints them.
    """
    if environ.get(JOB_FOLDER) != RECORDS_FOLDER:
        return None
    return _hold(Path(RECORDS_FOLDER))


def _hold(folder: Path) -> int:
    draft = folder / f".{_LOCK}"
    held = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    # Only now it can be found: nobody takes it for that of a launcher that has ended.
    draft.rename(folder / _LOCK)
    return held


def _is_over(folder: Path) -> bool:
    """Whether there was a launcher and it has ended, in whichever way."""
    try:
        lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _has_begun(folder: Path) -> bool:
    """Wait for a launcher; return whether there is or was one."""
    until = time.monotonic() + START_S
    while not (folder / _LOCK).exists():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


class Records:
    """What is written in a job's folder, in pieces.

    Args:
        job: The folder.
    """

    def __init__(self, job: JobFolder) -> None:
        self._job = job
        self._files = [job.events, job.metrics, *job.roll_ups.values(), job.ranks]
        self._read = dict.fromkeys(self._files, 0)
        self._log_end = 0
        self._heard_s = 0.0
        self._ranks_at = 0.0
        self._number = 0

    def news(self, now: float) -> Iterator[dict[str, Any]]:
        """Yield the records of what was written since the last time; the state comes last.

        Args:
            now: The time in seconds, by any clock.
        """
        # Looked at first: all that was before it is there.
        heard_s, state = self._job.heard_s(), self._job.state()
        for found in read_log(self._job.log, self._log_end):
            self._log_end = found.end
            if found.line is not None:
                yield self._record(line=format_line(found.line).decode(errors="replace")[:-1])
        for path in self._files:
            rows = list(self._rows(path))
            if path == self._job.ranks and rows:
                if now < self._ranks_at:
                    continue
                self._ranks_at, rows = now + RANKS_INTERVAL_S, rows[-1:]
            for row in rows:
                yield self._record(to=path.name, row=row)
        if state is not None and heard_s != self._heard_s:
            self._heard_s = heard_s
            yield self._record(state=state.to_json(), heard_s=heard_s)

    def _rows(self, path: Path) -> Iterator[Any]:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._read[path])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read[path] += len(line)
                try:
                    yield json.loads(line)
                except ValueError:
                    # Whoever wrote it was killed within it.
                    continue

    def _record(self, **content: Any) -> dict[str, Any]:
        record = {"n": self._number, **content}
        self._number += 1
        return record


def main(arguments: Sequence[str]) -> None:
    """Print records until the launcher has ended."""
    # The pod is told to end: who has something to say yet is the launcher.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(arguments[0])
    if not _has_begun(folder):
        sys.exit(f"hvdtrain: no launcher came within {START_S:g} s; its own log says why.")
    records = Records(JobFolder(folder))
    is_over = False
    while not is_over:
        # Asked before, so that nothing comes behind it.
        is_over = _is_over(folder)
        for record in records.news(time.monotonic()):
            print(json.dumps(record, separators=(",", ":")))
        sys.stdout.flush()
        if not is_over:
            time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
