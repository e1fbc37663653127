from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import all_jobs, create_job
from hvdtrain.jobs.process_identity import own_identity
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState
from hvdtrain.jobs.submission import start_again, submit_job


def _spec(tmp_path: Path, *options: str, **fields: str) -> JobSpec:
    known = {"folder": str(tmp_path), "python": sys.executable, **fields}
    return JobSpec(options=options, program=("true",), **known)  # type: ignore[arg-type]


def test_what_can_not_be_handed_over_leaves_no_folder(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    with pytest.raises(JobError, match="can't be handed over"):
        submit_job(jobs, _spec(tmp_path, python="/nowhere/python"), {}, ranks=1)
    assert all_jobs(jobs) == []
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="the job can't have a folder in"):
        submit_job(tmp_path / "file", _spec(tmp_path), {}, ranks=1)


def test_only_what_has_ended_starts_again_and_as_it_is_asked_for_now(tmp_path: Path) -> None:
    job = create_job(tmp_path / "jobs", _spec(tmp_path, python="/nowhere/python"))
    job.write_state(JobState(phase="running", launcher=own_identity()))

    def changed(spec: JobSpec) -> JobSpec:
        return dataclasses.replace(spec, program=("other",))

    with pytest.raises(JobError, match="is running; only what has ended starts again"):
        start_again(job, changed, lambda spec: 1, {})
    (job.path / "state.json").write_bytes(b"")
    with pytest.raises(JobError, match=r"its state.json can't be read.* may still run; only what"):
        start_again(job, changed, lambda spec: 1, {})
    job.write_state(JobState(phase="ended", attempt=3))
    job.request_stop(signal.SIGTERM)
    asked: list[JobSpec] = []
    with pytest.raises(JobError, match="can't be handed over"):
        start_again(job, changed, asked.append, {})
    assert [spec.program for spec in asked] == [("other",)]
    state = job.state()
    assert (job.spec().program, state and state.attempt) == (("other",), 3)
    # The word was for the run before.
    assert job.take_stop() is None
