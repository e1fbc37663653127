from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import JobFolder, JobRequest, all_jobs, create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity
from hvdtrain.jobs.submission import restart_job, submit_job


class Backend:
    """A queue that records its calls, and fails if it is told to."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.planned: list[JobRequest] = []
        self.submitted: list[JobRequest] = []

    def plan(self, request: JobRequest) -> SimpleNamespace:
        self.planned.append(request)
        return SimpleNamespace(request=request, preview=lambda: "")

    def submit(self, plan: SimpleNamespace) -> None:
        if self.error is not None:
            raise self.error
        self.submitted.append(plan.request)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    backend = Backend()
    monkeypatch.setattr("hvdtrain.jobs.submission.backend_for", lambda spec: backend)
    return backend


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def _spec(python: str = sys.executable) -> JobSpec:
    return JobSpec(options=("-np", "1"), program=("true",), folder="/", python=python)


def _request(job: JobFolder, spec: JobSpec) -> JobRequest:
    return JobRequest(job=job, spec=spec, environ={}, ranks=1)


def test_a_job_that_can_not_be_planned_leaves_no_folder(jobs_dir: Path) -> None:
    with pytest.raises(JobError, match="can't plan the job"):
        submit_job(_request(JobFolder(jobs_dir / "NAME"), _spec(python="/nowhere/python")))
    assert all_jobs(jobs_dir) == []


def test_a_job_that_can_not_be_submitted_leaves_no_folder(jobs_dir: Path, backend: Backend) -> None:
    backend.error = OSError("no such program")
    with pytest.raises(JobError, match="can't be submitted: no such program"):
        submit_job(_request(JobFolder(jobs_dir / "NAME"), _spec()))
    assert all_jobs(jobs_dir) == []
    (jobs_dir / "file").touch()
    with pytest.raises(JobError, match="no job folder can be created in"):
        submit_job(_request(JobFolder(jobs_dir / "file" / "NAME"), _spec()))


def test_an_interrupted_submission_keeps_the_folder_of_a_job_that_may_run(
    jobs_dir: Path, backend: Backend
) -> None:
    backend.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        submit_job(_request(JobFolder(jobs_dir / "NAME"), _spec()))
    [job] = all_jobs(jobs_dir)
    assert job.read_spec().program == ("true",)


def test_a_job_is_planned_once_with_its_own_folder(jobs_dir: Path, backend: Backend) -> None:
    job = submit_job(_request(JobFolder(jobs_dir / "NAME"), _spec()))
    [request] = backend.submitted
    assert backend.planned == [request]
    assert (request.job.path, request.spec) == (job.path, job.read_spec())
    state = job.read_state()
    assert state is not None
    assert state.phase == "queued"


def test_only_a_job_that_has_ended_is_restarted(jobs_dir: Path, backend: Backend) -> None:
    job = create_job(jobs_dir, _spec())
    job.write_state(JobState(phase="running", launcher=own_identity()))

    def changed(spec: JobSpec) -> JobRequest:
        return _request(job, dataclasses.replace(spec, program=("other",)))

    with pytest.raises(JobError, match="is running; only a job that has ended can be restarted"):
        restart_job(job, changed)
    (job.path / "state.json").write_bytes(b"")
    with pytest.raises(JobError, match=r"may be running: .*state.json can't be read; if none of"):
        restart_job(job, changed)
    job.write_state(JobState(phase="ended", attempt=3))
    job.request_stop(signal.SIGTERM)
    backend.error = OSError("no such program")
    with pytest.raises(JobError, match="can't be submitted"):
        restart_job(job, changed)
    state = job.read_state()
    assert (job.read_spec().program, state and state.attempt) == (("other",), 3)
    # The request was meant for the previous run.
    assert job.take_stop_request() is None


def test_one_of_two_concurrent_restarts_wins(jobs_dir: Path, backend: Backend) -> None:
    job = create_job(jobs_dir, _spec())
    job.write_state(JobState(phase="ended", code=1))
    errors: list[str] = []

    def restarted_meanwhile(spec: JobSpec) -> JobRequest:
        with pytest.raises(JobError) as error:
            restart_job(job, lambda spec: pytest.fail("planned"))
        errors.append(str(error.value))
        return _request(job, spec)

    restart_job(job, restarted_meanwhile)
    with pytest.raises(JobError, match="is queued; only a job that has ended can be restarted"):
        restart_job(job, lambda spec: _request(job, spec))
    assert errors == [f"{job.name} is being restarted by another process."]
    assert len(backend.submitted) == 1
