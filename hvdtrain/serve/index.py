"""An index of all jobs in memory, so that a list of ten thousand jobs is shown without delay.

All data come from the job folders. A folder is only read again if it has changed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView, view_job, view_jobs

__all__ = ["JobIndex", "matching"]

INTERVAL_S = 1.0
# How many jobs are read at a time: at first only the newest, for the first page of the list.
FIRST = 200
BATCH = 1000
# The fraction of one core's time that scanning for changes may take.
_SCAN_SHARE = 0.05


class JobIndex:
    """An index of the jobs in a directory. Several threads may use it at the same time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory  # the directory that contains the job folders
        self.version = 0  # a number that increases with each change of a job
        self._lock = threading.Lock()
        # The thread and requests refresh the index, but only one of them at a time.
        self._refreshing = threading.Lock()
        self._views: dict[str, JobView] = {}
        self._newest: list[JobView] = []
        self._modified: dict[str, int] = {}
        self._closing = threading.Event()
        self._pause_s = INTERVAL_S
        self._refresh(FIRST)

    def start(self) -> None:
        """Start a thread that reads the remaining jobs, then looks for changes every second."""
        threading.Thread(target=self._run, name="jobs", daemon=True).start()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()

    def views(self) -> list[JobView]:
        """Return all jobs, the newest first."""
        return list(self._newest)

    def view(self, name: str) -> JobView | None:
        """Return the current state of a job; None if there is no such job."""
        with self._lock:
            is_known = name in self._views
        folder = JobFolder(self.directory / name) if is_known else self.folder(name)
        return None if folder is None else view_job(folder)

    def folder(self, name: str) -> JobFolder | None:
        """Return the folder of a job; None if there is no such job."""
        # A name must not refer to a path outside the directory.
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            return None
        path = self.directory / name
        is_job = os.path.isdir(path) and not os.path.islink(path)
        return JobFolder(path) if is_job else None

    def refresh(self) -> None:
        """Read at most ``BATCH`` folders that have changed, the newest first."""
        with self._refreshing:
            self._refresh(BATCH)

    def _refresh(self, most: int) -> None:
        started = time.monotonic()
        modified = self._scan()
        with self._lock:
            removed = self._views.keys() - modified.keys()
            changed = [name for name, at in modified.items() if self._modified.get(name) != at]
            # An active job's state may change although its folder does not, for example if its
            # launcher is killed.
            names = [name for name in modified.keys() - set(changed) if self._may_change(name)]
        changed.sort(key=modified.__getitem__, reverse=True)
        names += changed[:most]
        later = changed[most:]
        views = view_jobs([JobFolder(self.directory / name) for name in names])
        with self._lock:
            differs = bool(removed)
            for name in removed:
                del self._views[name]
            for view in views:
                differs = differs or self._views.get(view.name) != view
                self._views[view.name] = view
            self._modified = modified | {name: self._modified.get(name, -1) for name in later}
            if differs:
                self._newest = sorted(
                    self._views.values(), key=lambda view: (view.created_s, view.name), reverse=True
                )
                self.version += 1
        duration_s = time.monotonic() - started
        self._pause_s = 0.0 if later else max(INTERVAL_S, duration_s / _SCAN_SHARE)

    def _may_change(self, name: str) -> bool:
        view = self._views.get(name)
        return view is None or not view.is_over

    def _scan(self) -> dict[str, int]:
        """Return the modification time of each folder in nanoseconds."""
        modified = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            for entry in entries:
                # A folder may be removed during the scan.
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                        # A new state is renamed into place, which modifies the folder.
                        modified[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        return modified

    def _run(self) -> None:
        while not self._closing.wait(self._pause_s):
            self.refresh()


def matching(views: Sequence[JobView], text: str, status: str) -> list[JobView]:
    """Return the jobs with this status whose name or program contains ``text``.

    An empty ``status`` or ``text`` matches all jobs.
    """
    text = text.lower()
    return [
        view
        for view in views
        if (not status or view.status == status)
        and (not text or text in view.name.lower() or text in " ".join(view.spec.program).lower())
    ]
