from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import JobFolder, all_jobs, create_job
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
    with pytest.raises(JobError, match=r"may be running: .*state.json can't be read; if none of"):
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


def test_of_two_restarts_at_once_one_starts_the_job(tmp_path: Path) -> None:
    job = create_job(tmp_path / "jobs", _spec(tmp_path, "-np", "1"))
    job.write_state(JobState(phase="ended", code=1))
    refused: list[str] = []

    def other(spec: JobSpec) -> int:
        """Another process restarts it while this one plans."""
        with pytest.raises(JobError) as error:
            start_again(job, lambda spec: spec, lambda spec: pytest.fail("planned"), {})
        refused.append(str(error.value))
        return 1

    started: list[JobFolder] = []
    backend = SimpleNamespace(hand_over=lambda job, *arguments, **more: started.append(job))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvdtrain.jobs.submission.backend_of", lambda spec: backend)
        start_again(job, lambda spec: spec, other, {})
        with pytest.raises(JobError, match="is queued; only what has ended starts again"):
            start_again(job, lambda spec: spec, lambda spec: 1, {})
    assert refused == [f"{job.name} is being restarted by another process."]
    assert started == [job]
