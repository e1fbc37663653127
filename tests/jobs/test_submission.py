from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.backend import JobRequest
from hvdtrain.jobs.folder import JobFolder, all_jobs, create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity
from hvdtrain.jobs.submission import start_again, submit_job


def _spec(tmp_path: Path, *options: str, **fields: str) -> JobSpec:
    known = {"folder": str(tmp_path), "python": sys.executable, **fields}
    return JobSpec(options=options, program=("true",), **known)  # type: ignore[arg-type]


def _request(job: JobFolder, spec: JobSpec) -> JobRequest:
    return JobRequest(job=job, spec=spec, environ={}, ranks=1)


class Backend:
    """Records its calls, and plays a queue that fails."""

    def __init__(self, error: str = "") -> None:
        self.submitted: list[object] = []
        self._error = error

    def plan(self, request: JobRequest) -> SimpleNamespace:
        return SimpleNamespace(request=request, preview=lambda: "")

    def submit(self, plan: SimpleNamespace) -> None:
        if self._error:
            raise OSError(self._error)
        self.submitted.append(plan.request)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Backend], None]:
    """Gives all jobs one backend."""
    return lambda backend: monkeypatch.setattr(
        "hvdtrain.jobs.submission.backend_of", lambda spec: backend
    )


def test_what_can_not_be_submitted_leaves_no_folder(
    tmp_path: Path, use: Callable[[Backend], None]
) -> None:
    new = JobFolder(tmp_path / "jobs" / "NAME")
    with pytest.raises(JobError, match="can't plan the job"):
        submit_job(_request(new, _spec(tmp_path, python="/nowhere/python")))
    assert not new.path.parent.exists()
    use(Backend("no such program"))
    with pytest.raises(JobError, match="can't be submitted: no such program"):
        submit_job(_request(new, _spec(tmp_path)))
    assert all_jobs(new.path.parent) == []
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="the job can't have a folder in"):
        submit_job(_request(JobFolder(tmp_path / "file" / "NAME"), _spec(tmp_path)))


def test_the_plan_of_a_job_has_its_own_folder(
    tmp_path: Path, use: Callable[[Backend], None]
) -> None:
    backend = Backend()
    use(backend)
    job = submit_job(_request(JobFolder(tmp_path / "jobs" / "NAME"), _spec(tmp_path)))
    [request] = backend.submitted
    assert isinstance(request, JobRequest)
    assert (request.job.path, request.spec) == (job.path, job.spec())
    state = job.state()
    assert state is not None
    assert state.phase == "queued"


def test_only_what_has_ended_starts_again_and_as_it_is_asked_for_now(
    tmp_path: Path, use: Callable[[Backend], None]
) -> None:
    job = create_job(tmp_path / "jobs", _spec(tmp_path))
    job.write_state(JobState(phase="running", launcher=own_identity()))

    def changed(spec: JobSpec) -> JobRequest:
        return _request(job, dataclasses.replace(spec, program=("other",)))

    with pytest.raises(JobError, match="is running; only what has ended starts again"):
        start_again(job, changed)
    (job.path / "state.json").write_bytes(b"")
    with pytest.raises(JobError, match=r"may be running: .*state.json can't be read; if none of"):
        start_again(job, changed)
    job.write_state(JobState(phase="ended", attempt=3))
    job.request_stop(signal.SIGTERM)
    use(Backend("no such program"))
    with pytest.raises(JobError, match="can't be submitted"):
        start_again(job, changed)
    state = job.state()
    assert (job.spec().program, state and state.attempt) == (("other",), 3)
    # The request was meant for the run before.
    assert job.take_stop() is None


def test_of_two_restarts_at_once_one_starts_the_job(
    tmp_path: Path, use: Callable[[Backend], None]
) -> None:
    job = create_job(tmp_path / "jobs", _spec(tmp_path, "-np", "1"))
    job.write_state(JobState(phase="ended", code=1))
    refused: list[str] = []

    def other(spec: JobSpec) -> JobRequest:
        """Another process restarts it while this one plans."""
        with pytest.raises(JobError) as error:
            start_again(job, lambda spec: pytest.fail("planned"))
        refused.append(str(error.value))
        return _request(job, spec)

    backend = Backend()
    use(backend)
    start_again(job, other)
    with pytest.raises(JobError, match="is queued; only what has ended starts again"):
        start_again(job, lambda spec: _request(job, spec))
    assert refused == [f"{job.name} is being restarted by another process."]
    assert len(backend.submitted) == 1
