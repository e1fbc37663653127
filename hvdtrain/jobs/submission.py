"""Submits, restarts and stops jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Callable, Iterator

from hvdtrain.errors import JobError
from hvdtrain.jobs.backends import JobPlan, backend_for, queue_for
from hvdtrain.jobs.files import try_lock
from hvdtrain.jobs.folder import JobFolder, JobRequest, create_job
from hvdtrain.jobs.job_view import JobView, view_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

__all__ = ["restart_job", "stop_job", "submit_job"]


def submit_job(request: JobRequest) -> JobFolder:
    """Submit a new job and return its folder.

    The folder is created in the directory that contains ``request.job``.

    Raises:
        ConfigurationError: If the job can't be started as described.
        JobError: If the job can't be submitted. Its folder is removed.
    """
    directory = request.job.path.parent
    try:
        job = create_job(directory, request.spec)
    except OSError as error:
        raise JobError(f"no job folder can be created in {directory}: {error.strerror}") from None
    request = dataclasses.replace(request, job=job)
    try:
        with _job_errors(job):
            job.write_state(JobState(phase="queued"))
        plan = _checked_plan(request)
    except BaseException:
        job.discard()
        raise
    try:
        with _job_errors(job):
            backend_for(request.spec).submit(plan)
    except JobError:
        # Any other exception, such as Ctrl-C, may leave the job in its queue, so the folder stays.
        job.discard()
        raise
    return job


def restart_job(job: JobFolder, request_for: Callable[[JobSpec], JobRequest]) -> None:
    """Rerun a job that has ended, in the same folder.

    ``request_for`` is called with the job's specification, and returns the request with which the
    job is submitted again.

    Raises:
        ConfigurationError: If the job can't be started as described.
        JobError: If the job has not ended, another process is restarting it, or it can't be
            submitted.
    """
    try:
        # The lock is held until the job is queued, so that another restart sees that the job has
        # not ended.
        with try_lock(job.restart_lock) as is_locked:
            if not is_locked:
                raise JobError(f"{job.name} is being restarted by another process.")
            view = view_job(job)
            if view.doubt:
                raise JobError(view.doubt)
            if not view.is_over:
                hint = " and may still run" if view.status == "silent" else ""
                raise JobError(
                    f"{job.name} is {view.status}{hint}; only a job that has ended can be "
                    f"restarted. Stop it with hvdtrain stop {job.name}, or start a copy with "
                    f"hvdtrain clone {job.name}."
                )
            request = request_for(job.read_spec())
            plan = _checked_plan(request)
            with _job_errors(job):
                job.write_spec(request.spec)
                while job.take_stop_request() is not None:
                    # This request was meant for the previous run.
                    pass
                state = job.read_state() or JobState(phase="queued")
                job.write_state(dataclasses.replace(state, phase="queued", launcher=None))
                backend_for(request.spec).submit(plan)
    except OSError as error:
        raise JobError(f"{job.restart_lock} can't be locked: {error.strerror}") from None


def _checked_plan(request: JobRequest) -> JobPlan:
    plan = backend_for(request.spec).plan(request)
    plan.preview()
    return plan


@contextlib.contextmanager
def _job_errors(job: JobFolder) -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise JobError(f"job {job.name} can't be submitted: {error}") from None


def stop_job(job: JobFolder, view: JobView, *, save: bool) -> None:
    """Ask a job that has not ended to stop.

    If ``save`` is true, the job's ranks save a checkpoint first.

    Raises:
        JobError: If it is unknown whether the job runs, or if the job can't be reached.
    """
    if view.doubt:
        raise JobError(view.doubt)
    try:
        queue_for(view.spec).cancel(job, view.spec, is_queued=view.status == "queued", save=save)
    except OSError as error:
        raise JobError(f"{job.name} can't be stopped: {error.strerror}") from None
