from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity
from hvdtrain.serve.index import JobIndex, matching


def _job(directory: Path, created_s: float, *program: str) -> JobFolder:
    spec = JobSpec(options=(), program=program, folder="/", created_s=created_s)
    job = create_job(directory, spec)
    job.write_state(JobState(phase="running", launcher=own_identity()))
    return job


def _statuses(index: JobIndex) -> dict[str, str]:
    index.refresh()
    return {view.name: view.status for view in index.views()}


def test_changes_are_found_and_counted(tmp_path: Path) -> None:
    index = JobIndex(tmp_path / "jobs")
    assert index.views() == []
    first = _job(tmp_path / "jobs", 1.0, "a.py")
    second = _job(tmp_path / "jobs", 2.0, "b.py")
    assert list(_statuses(index)) == [second.name, first.name], "the newest first"
    version = index.version
    index.refresh()
    assert index.version == version, "nothing has changed"
    time.sleep(0.01)
    first.write_state(JobState(phase="ended", code=0, cause="done"))
    assert _statuses(index)[first.name] == "done"
    assert index.version > version
    shutil.rmtree(second.path)
    assert list(_statuses(index)) == [first.name]


def test_a_killed_launcher_is_noticed_in_an_unchanged_folder(tmp_path: Path, monkeypatch) -> None:
    job = _job(tmp_path, 1.0, "a.py")
    index = JobIndex(tmp_path)
    assert _statuses(index) == {job.name: "running"}
    monkeypatch.setattr("hvdtrain.jobs.folder.is_alive", lambda process: False)
    assert _statuses(index) == {job.name: "lost"}


def test_ended_jobs_are_not_read_again(tmp_path: Path, monkeypatch) -> None:
    for number in range(50):
        job = _job(tmp_path, float(number), "a.py")
        gone = dataclasses.replace(own_identity(), pid=1, started_ticks=1)
        job.write_state(JobState(phase="ended" if number % 2 else "running", launcher=gone, code=0))
    index = JobIndex(tmp_path)
    read = []
    monkeypatch.setattr("hvdtrain.serve.index.view_jobs", lambda jobs: read.extend(jobs) or [])
    index.refresh()
    assert read == []


def test_a_folder_removed_during_a_scan_is_skipped(tmp_path: Path, monkeypatch) -> None:
    jobs = [_job(tmp_path, float(number), "a.py") for number in range(3)]
    index = JobIndex(tmp_path)

    class Entry:
        """An entry of ``os.scandir``; the folder of the second job has been removed."""

        def __init__(self, job: JobFolder) -> None:
            self.name = job.name

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            return True

        def stat(self, *, follow_symlinks: bool = True) -> SimpleNamespace:
            if self.name == jobs[1].name:
                raise FileNotFoundError(self.name)
            return SimpleNamespace(st_mtime_ns=1)

    @contextlib.contextmanager
    def scandir(path: Path) -> Iterator[list[Entry]]:
        yield [Entry(job) for job in jobs]

    with monkeypatch.context() as patched:
        patched.setattr("hvdtrain.serve.index.os.scandir", scandir)
        assert list(_statuses(index)) == [jobs[2].name, jobs[0].name]


def test_the_newest_jobs_are_read_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("hvdtrain.serve.index.FIRST", 2)
    monkeypatch.setattr("hvdtrain.serve.index.BATCH", 3)
    names = []
    for number in range(7):
        names.append(_job(tmp_path, float(number), "a.py").name)
        os.utime(tmp_path / names[-1], (number, number))
    index = JobIndex(tmp_path)
    for count in (2, 5, 7, 7):
        assert [view.name for view in index.views()] == names[::-1][:count]
        index.refresh()
    # The thread reads the rest without pauses.
    index = JobIndex(tmp_path)
    index.start()
    try:
        deadline = time.monotonic() + 10
        while len(index.views()) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        index.close()


def test_jobs_are_filtered_by_text_and_status(tmp_path: Path) -> None:
    first = _job(tmp_path, 1.0, "train.py", "--model", "LeNet")
    second = _job(tmp_path, 2.0, "eval.py")
    second.write_state(JobState(phase="ended", code=1, cause="exception"))
    views = JobIndex(tmp_path).views()
    assert len(matching(views, "", "")) == 2
    assert [view.name for view in matching(views, "lenet", "")] == [first.name]
    assert [view.name for view in matching(views, "", "failed")] == [second.name]
    assert matching(views, "lenet", "failed") == []
