"""``hvdtrain run``: runs a job and records it, when its turn has come if it was submitted."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.exit_codes import ExitCode
from hvdtrain.jobs.folder import JOB_FOLDER, JOBS_DIR, JobFolder, create_job, jobs_directory
from hvdtrain.jobs.recorder import JobRecorder
from hvdtrain.jobs.spec import JobSpec, make_spec
from hvdtrain.launch import cli as launch
from hvdtrain.launch.attempts import (
    caught_signals,
    end_waiting,
    find_plan,
    ignore_signals,
    run_plan,
)
from hvdtrain.launch.observer import JobEnded
from hvdtrain.launch.plan import Job

__all__ = ["add_arguments", "run", "run_recorded", "spec_of", "with_files"]

add_arguments = launch.add_arguments
with_files = launch.with_files
logger = logging.getLogger("hvdtrain.launch")

_USAGE_ERROR = 2


def run(arguments: argparse.Namespace) -> int:
    """Start the job that ``arguments`` describe and return its exit code.

    Raises:
        ConfigurationError: A setting can't be used, no program was named, or hosts don't fit.
    """
    if arguments.check_build:
        from hvdtrain.launch.horovodrun import look

        print(look(os.environ))
        return 0
    job, environ = launch.job_of(arguments, os.environ)
    if arguments.jobs_dir is not None:
        environ[JOBS_DIR] = arguments.jobs_dir
    try:
        return run_recorded(job, environ, spec_of(arguments, os.environ))
    except LaunchError as error:
        logger.error("%s", error)
        return ExitCode.CANNOT_START
    finally:
        # A stop that arrives while Python exits must not replace the code of the job.
        atexit.register(ignore_signals)


def spec_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> JobSpec:
    """Make the specification of the job that ``arguments`` ask for, to be asked for again.

    Raises:
        ConfigurationError: No program was named.
    """
    options = arguments.argv[: len(arguments.argv) - len(arguments.program)]
    # Python versions differ in whether argparse leaves it to the program.
    options = options[:-1] if options[-1:] == ["--"] else options
    asked_for = [name for name, given in arguments.env if given is None]
    return make_spec(options, launch.program_of(arguments), environ, asked_for)


def run_recorded(job: Job, environ: dict[str, str], spec: JobSpec) -> int:
    """Run a job to its end, or print its plan; returns the exit code.

    Args:
        job: The job.
        environ: The environment of its ranks.
        spec: The request, for the job's folder.

    Raises:
        ConfigurationError: Hosts can't be read, or the ranks don't fit on them.
        JobError: The queue can't be used.
        LaunchError: There is no usable mpirun or srun, or it can't be started.
    """
    if (given := environ.pop(JOB_FOLDER, None)) is not None:
        return _run_submitted(job, environ, JobFolder(Path(given)))
    site, plan = find_plan(job, environ)
    # Signals are caught until the recorder has closed: one that comes then changes nothing.
    with caught_signals() as received:
        if job.dry_run or (folder := _new_folder(spec, environ)) is None:
            return run_plan(job, site, plan, environ, received)
        with _recorder(folder) as recorder:
            return run_plan(job, site, plan, environ, received, observer=recorder)


def _run_submitted(job: Job, environ: dict[str, str], folder: JobFolder) -> int:
    """Run a job of ``hvdtrain submit`` in its folder, once as many slots are free as it needs."""
    from hvdtrain.jobs.slots import await_slots, gpu_variables, slots_of

    with caught_signals() as received, _recorder(folder) as recorder:
        recorder.state(phase="queued", code=None, cause="", verdict="")
        site, plan = find_plan(job, environ)
        if not site.in_slurm:
            slots = slots_of(site.hosts, site.gpus)
            taken = await_slots(folder.path, plan.hosts, slots, received)
            if taken is not None and (own := gpu_variables(environ, taken, site.gpus)):
                environ |= own
                site, plan = find_plan(job, environ)
        if received:
            return end_waiting(recorder, received[0])
        # Its log has all output, and nobody reads it here.
        return run_plan(job, site, plan, environ, received, observer=recorder, is_seen=False)


def _new_folder(spec: JobSpec, environ: Mapping[str, str]) -> JobFolder | None:
    """Create a folder for a job; None if none can be created."""
    if (directory := jobs_directory(environ)) is not None:
        try:
            return create_job(directory, spec)
        except OSError as error:
            logger.info(f"hvdtrain jobs won't list this job: {directory}: {error.strerror}")
    return None


@contextlib.contextmanager
def _recorder(folder: JobFolder) -> Iterator[JobRecorder]:
    """A recorder, closed at the end; an error within the block is the job's end."""
    recorder = JobRecorder(folder)
    try:
        yield recorder
    except HvdtrainError as error:
        code = ExitCode.CANNOT_START if isinstance(error, LaunchError) else _USAGE_ERROR
        recorder.notice(str(error))
        recorder.on_event(JobEnded(code=int(code), cause="infrastructure", verdict=str(error)))
        raise
    finally:
        recorder.close()
