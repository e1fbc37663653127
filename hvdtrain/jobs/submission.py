"""Submits jobs to their queues."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable

from hvdtrain.errors import JobError
from hvdtrain.jobs.backend import JobRequest
from hvdtrain.jobs.backends import backend_of
from hvdtrain.jobs.files import try_lock
from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.job_view import view_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

__all__ = ["start_again", "submit_job"]


def submit_job(request: JobRequest) -> JobFolder:
    """Submit a new job; return its folder, which is next to that of the request.

    Raises:
        ConfigurationError: The job can't be started as it is described.
        JobError: It can't be submitted; it has no folder then.
    """
    backend_of(request.spec).plan(request).preview()
    directory = request.job.path.parent
    try:
        job = create_job(directory, request.spec)
    except OSError as error:
        raise JobError(f"the job can't have a folder in {directory}: {error.strerror}") from None
    try:
        _submit(dataclasses.replace(request, job=job))
    except JobError:
        job.discard()
        raise
    return job


def start_again(job: JobFolder, request_for: Callable[[JobSpec], JobRequest]) -> None:
    """Submit a job that has ended, in its folder.

    Args:
        job: The job's folder.
        request_for: Makes the request from the job's specification.

    Raises:
        ConfigurationError: The job can't be started as it is described.
        JobError: It has not ended, another process restarts it, or it can't be submitted.
    """
    try:
        # Held until the job is queued: another process then sees that it has not ended.
        with try_lock(job.restart_lock) as lock:
            if lock is None:
                raise JobError(f"{job.name} is being restarted by another process.")
            view = view_job(job)
            view.require_known()
            if not view.is_over:
                where = " and may still run" if view.status == "silent" else ""
                raise JobError(
                    f"{job.name} is {view.status}{where}; only what has ended starts again. "
                    f"hvdtrain stop {job.name} ends it, "
                    f"hvdtrain clone {job.name} makes another."
                )
            request = request_for(job.spec())
            backend_of(request.spec).plan(request).preview()
            _submit(request)
    except OSError as error:
        raise JobError(f"{job.restart_lock} can't be locked: {error.strerror}") from None


def _submit(request: JobRequest) -> None:
    job, backend = request.job, backend_of(request.spec)
    try:
        job.write_spec(request.spec)
        while job.take_stop() is not None:
            # It was meant for the run before.
            pass
        before = job.state() or JobState(phase="queued")
        job.write_state(dataclasses.replace(before, phase="queued", launcher=None))
        backend.submit(backend.plan(request))
    except (OSError, subprocess.SubprocessError) as error:
        raise JobError(f"job {job.name} can't be submitted: {error}") from None
