"""The folder of a job: the one that it was submitted with, or a new one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from hvdtrain.agent.exit_codes import ExitCode
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder, create_job, jobs_directory
from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.jobs.spec import JobSpec

__all__ = ["new_recorder", "submitted_recorder"]

logger = logging.getLogger(__package__)

_USAGE_ERROR = 2


@contextlib.contextmanager
def submitted_recorder(environ: MutableMapping[str, str]) -> Iterator[JobRecorder | None]:
    """The folder of the job that this process was started for by ``hvdtrain submit``, if it was.

    The variable that says so is removed. An error within the block is the job's end.
    """
    given = environ.pop(JOB_FOLDER, None)
    if given is None:
        yield None
        return
    with _until_closed(JobRecorder(JobFolder(Path(given)))) as recorder:
        recorder.state(phase="queued", code=None, cause="", verdict="")
        yield recorder


@contextlib.contextmanager
def new_recorder(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[JobRecorder]:
    """A new folder for a job, or none where none can be made; an error is the job's end."""
    folder = None
    if (directory := jobs_directory(environ)) is not None:
        try:
            folder = create_job(directory, spec)
        except OSError as error:
            logger.info(f"hvdtrain jobs won't list this job: {directory}: {error.strerror}")
    with _until_closed(JobRecorder(folder)) as recorder:
        yield recorder


@contextlib.contextmanager
def _until_closed(recorder: JobRecorder) -> Iterator[JobRecorder]:
    try:
        yield recorder
    except HvdtrainError as error:
        code = ExitCode.CANNOT_START if isinstance(error, LaunchError) else _USAGE_ERROR
        recorder.notice(str(error))
        recorder.state(phase="ended", code=int(code), cause="infrastructure", verdict=str(error))
        raise
    finally:
        recorder.close()
