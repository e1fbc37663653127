"""``hvdtrain run``: runs a job and records it. A submitted job first waits for its slots."""

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
from hvdtrain.launch.attempts import end_waiting, run_plan
from hvdtrain.launch.observer import JobEnded
from hvdtrain.launch.plan import Job, find_plan
from hvdtrain.launch.supervisor import caught_signals, ignore_signals

__all__ = ["add_arguments", "run", "run_recorded", "spec_of", "with_files"]

add_arguments = launch.add_arguments
with_files = launch.with_files
logger = logging.getLogger("hvdtrain.launch")

_USAGE_ERROR = 2


def run(arguments: argparse.Namespace) -> int:
    """Start a job and return its exit code."""
    if arguments.check_build:
        from hvdtrain.launch.horovodrun import check_build

        print(check_build(os.environ))
        return 0
    job, environ = launch.make_job(arguments, os.environ)
    if arguments.jobs_dir is not None:
        environ[JOBS_DIR] = arguments.jobs_dir
    try:
        return run_recorded(job, environ, spec_of(arguments, os.environ))
    except LaunchError as error:
        logger.error("error: %s", error)
        return ExitCode.CANNOT_START
    finally:
        # A signal that arrives while Python exits must not replace the exit code of the job.
        atexit.register(ignore_signals)


def spec_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> JobSpec:
    """Return the specification of the job that ``arguments`` describe.

    Raises:
        ConfigurationError: If the program is missing.
    """
    options = arguments.argv[: len(arguments.argv) - len(arguments.program)]
    # It depends on the version of Python whether argparse leaves "--" in the program.
    options = options[:-1] if options[-1:] == ["--"] else options
    exported = [name for name, value in arguments.env if value is None]
    return make_spec(options, launch.get_program(arguments), environ, exported)


def run_recorded(job: Job, environ: dict[str, str], spec: JobSpec) -> int:
    """Run a job to its end, or print its plan; return the exit code.

    Raises:
        ConfigurationError: If the hosts can't be read, or the ranks don't fit on the hosts.
        JobError: If the queue can't be used.
        LaunchError: If no usable mpirun or srun was found, or if it can't be started.
    """
    if (folder_path := environ.pop(JOB_FOLDER, None)) is not None:
        return _run_submitted(job, environ, JobFolder(Path(folder_path)))
    site, plan = find_plan(job, environ)
    # Until the recorder has closed, signals must not interrupt this process.
    with caught_signals() as received:
        if job.dry_run or (folder := _new_folder(spec, environ)) is None:
            return run_plan(job, site, plan, environ, received)
        with _recorder(folder) as recorder:
            return run_plan(job, site, plan, environ, received, observer=recorder)


def _run_submitted(job: Job, environ: dict[str, str], folder: JobFolder) -> int:
    """Wait for the slots of a submitted job and run it in its folder."""
    from hvdtrain.jobs.slots import acquire_slots, gpu_variables, slots_by_host

    with caught_signals() as received, _recorder(folder) as recorder:
        recorder.update_state(phase="queued", code=None, cause="", verdict="")
        site, plan = find_plan(job, environ)
        if not site.in_slurm:
            slots = slots_by_host(site.hosts, site.gpus)
            acquired = acquire_slots(folder.path, plan.hosts, slots, received)
            if acquired is not None and (gpus := gpu_variables(environ, acquired, site.gpus)):
                environ |= gpus
                site, plan = find_plan(job, environ)
        if received:
            return end_waiting(recorder, received[0])
        # Nobody sees the output of this process, but everything is in the log.
        return run_plan(job, site, plan, environ, received, observer=recorder, is_seen=False)


def _new_folder(spec: JobSpec, environ: Mapping[str, str]) -> JobFolder | None:
    """Create a job's folder. Return None if jobs are not recorded, or if this fails."""
    if (directory := jobs_directory(environ)) is not None:
        try:
            return create_job(directory, spec)
        except OSError as error:
            logger.info(f"this job is not recorded: {directory}: {error.strerror}")
    return None


@contextlib.contextmanager
def _recorder(folder: JobFolder) -> Iterator[JobRecorder]:
    """Yield a recorder for a job. It records an error of the block as the job's end."""
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
