"""All jobs as they are now, kept in memory, so that a list of ten thousand is there at once.

It holds nothing that is not in the folders; only what has changed is read again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView, view_jobs

__all__ = ["JobIndex", "matching"]

INTERVAL_S = 1.0
# Slurm and Kubernetes are asked about what only they know, which costs them something.
QUEUES_INTERVAL_S = 15.0
# Jobs that are read at once: first the newest, which fill the first page of the list.
FIRST = 200
BATCH = 1000
# Looking for changes may take one core for at most this part of its time.
_LOOKING_SHARE = 0.05


class JobIndex:
    """The jobs of a directory; may be asked from any thread.

    Args:
        directory: Where their folders are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        # Of the thread and of requests; one at a time, as each goes by what it saw before.
        self._refreshing = threading.Lock()
        self._views: dict[str, JobView] = {}
        self._newest: list[JobView] = []
        self._changed: dict[str, int] = {}
        self._queues_at = 0.0
        self._closing = threading.Event()
        self._version = 0
        self._pause_s = INTERVAL_S
        self._refresh(FIRST)

    def start(self) -> None:
        """Read the rest, and look for changes about once a second, on a thread."""
        threading.Thread(target=self._refresh_often, name="jobs", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()

    @property
    def directory(self) -> Path:
        """The directory of the folders of jobs."""
        return self._directory

    @property
    def version(self) -> int:
        """Another number after each change."""
        return self._version

    def views(self) -> list[JobView]:
        """All jobs, the newest first."""
        return list(self._newest)

    def view(self, name: str) -> JobView | None:
        """One job, read now; None where there is none of that name."""
        with self._lock:
            known = name in self._views
        if not known and not self._is_job(name):
            return None
        [view] = view_jobs([JobFolder(self._directory / name)])
        return view

    def folder(self, name: str) -> JobFolder | None:
        """The folder of a job; None where there is none of that name."""
        return JobFolder(self._directory / name) if self._is_job(name) else None

    def refresh(self) -> None:
        """Read what has changed since the last time, the newest first, and not more than BATCH."""
        with self._refreshing:
            self._refresh(BATCH)

    def _refresh(self, most: int) -> None:
        began = time.monotonic()
        changed = self._scan()
        queues = time.monotonic() - self._queues_at > QUEUES_INTERVAL_S
        if queues:
            self._queues_at = time.monotonic()
        with self._lock:
            gone = self._views.keys() - changed.keys()
            new = [name for name, at in changed.items() if self._changed.get(name) != at]
            # What is not over may be so without a change: its launcher may be gone.
            again = [
                name for name in changed.keys() - set(new) if self._may_change(name, queues=queues)
            ]
        new.sort(key=changed.__getitem__, reverse=True)
        again += new[:most]
        # What is left for the next time is as it was then.
        left = new[most:]
        seen = changed | {name: self._changed.get(name, -1) for name in left}
        views = view_jobs([JobFolder(self._directory / name) for name in again])
        with self._lock:
            differs = bool(gone)
            for name in gone:
                del self._views[name]
            for view in views:
                differs = differs or self._views.get(view.name) != view
                self._views[view.name] = view
            self._changed = seen
            if differs:
                views = list(self._views.values())
                views.sort(key=lambda view: (view.created_s, view.name), reverse=True)
                self._newest = views
            self._version += differs
        took_s = time.monotonic() - began
        self._pause_s = 0.0 if left else max(INTERVAL_S, took_s / _LOOKING_SHARE)

    def _may_change(self, name: str, *, queues: bool) -> bool:
        view = self._views.get(name)
        if view is None:
            return True
        if view.is_over or queues:
            return not view.is_over
        # The cluster is asked about jobs whose folder is on no volume.
        is_read_here = view.spec.backend.kind != "kubernetes"
        return is_read_here and (not view.spec.slurm_job or view.status == "running")

    def _scan(self) -> dict[str, int]:
        try:
            with os.scandir(self._directory) as entries:
                found = [
                    entry
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return {}
        changed = {}
        for entry in found:
            # A folder may be removed meanwhile, which is no matter of the others.
            with contextlib.suppress(FileNotFoundError):
                # A state is renamed into place, which changes its folder.
                changed[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        return changed

    def _is_job(self, name: str) -> bool:
        # Nothing that leads elsewhere: the names of jobs are words.
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            return False
        path = os.path.join(self._directory, name)
        return os.path.isdir(path) and not os.path.islink(path)

    def _refresh_often(self) -> None:
        while not self._closing.wait(self._pause_s):
            self.refresh()


def matching(views: Sequence[JobView], text: str, status: str) -> list[JobView]:
    """Return the jobs whose name or program holds ``text`` and whose status fits; empty for any."""
    text = text.lower()
    return [
        view
        for view in views
        if (not status or view.status == status)
        and (not text or text in view.name.lower() or text in " ".join(view.spec.program).lower())
    ]
