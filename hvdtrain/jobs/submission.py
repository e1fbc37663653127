"""Hands a job over to a process of its own, which waits for its turn and runs it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain.agent.agent_environment import ATTEMPT, JOB, OUTPUT_DIR
from hvdtrain.config import COLUMNS, LAUNCHER, REPORT_FD, Settings, variable_name
from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder, create_job
from hvdtrain.jobs.job_view import view_job
from hvdtrain.jobs.kubernetes.pod_submission import create, pod_job
from hvdtrain.jobs.slurm import sbatch_argv, submit
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

__all__ = ["check_options", "hand_over", "start_again", "submit_job"]

_OF_RANKS = {ATTEMPT, COLUMNS, JOB, LAUNCHER, OUTPUT_DIR, REPORT_FD}
CHECK_TIMEOUT_S = 60.0
START_TIMEOUT_S = 30.0


def _command(spec: JobSpec, *more: str) -> list[str]:
    """The command that runs a job; ``more`` are further options."""
    return [spec.python, "-m", "hvdtrain", "run", *spec.options, *more, "--", *spec.program]


def check_options(spec: JobSpec, environ: Mapping[str, str]) -> str:
    """The plan that ``hvdtrain run`` makes of a job, which is not started.

    Raises:
        ConfigurationError: It makes none; the message says why.
        JobError: It can't be asked.
    """
    try:
        done = subprocess.run(
            _command(spec, "--dry-run"),
            cwd=spec.folder,
            env=_environment(spec, environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"{spec.python} can't plan the job in {spec.folder}: {error}") from None
    if done.returncode != 0:
        said = "\n".join(
            line.removeprefix("hvdtrain run: ") for line in done.stderr.strip().splitlines()
        )
        raise ConfigurationError(said or f"hvdtrain run --dry-run ended with {done.returncode}")
    return done.stdout


def submit_job(
    directory: Path, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
) -> JobFolder:
    """Make a folder for a job, and hand it over.

    Raises:
        JobError: It can't be handed over; it has no folder then.
    """
    try:
        folder = create_job(directory, spec)
    except OSError as error:
        raise JobError(f"the job can't have a folder in {directory}: {error.strerror}") from None
    try:
        hand_over(folder, spec, environ, ranks=ranks)
    except JobError:
        folder.discard()
        raise
    return folder


def start_again(
    folder: JobFolder,
    changed: Callable[[JobSpec], JobSpec],
    ranks_of: Callable[[JobSpec], int | None],
    environ: Mapping[str, str],
) -> None:
    """Hand over a job that has ended, in the folder that it has.

    Args:
        folder: The job's folder.
        changed: What is asked for now, made of what was asked for before.
        ranks_of: How many ranks that has, if it can be started.
        environ: This process's variables.

    Raises:
        JobError: It has not ended, or it can't be handed over.
    """
    view = view_job(folder)
    if not view.is_over:
        where = " and may still run" if view.status == "silent" else ""
        raise JobError(
            f"{folder.name} is {view.status}{where}; only what has ended starts again. "
            f"hvdtrain stop {folder.name} ends it, hvdtrain clone {folder.name} makes another."
        )
    spec = changed(folder.spec())
    hand_over(folder, spec, environ, ranks=ranks_of(spec))


def hand_over(
    folder: JobFolder, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
) -> None:
    """Give a job to Slurm, or to a process that runs it in its turn, whatever becomes of this one.

    Args:
        folder: The job's folder, which is queued then.
        spec: What is asked for; it is written there.
        environ: This process's variables.
        ranks: How many there are; None for as many as Slurm gives tasks.

    Raises:
        JobError: It can't be handed over.
    """
    try:
        folder.write_spec(spec)
        before = folder.state() or JobState(phase="queued")
        folder.write_state(dataclasses.replace(before, phase="queued", launcher=None))
        variables = {**_environment(spec, environ), JOB_FOLDER: str(folder.path)}
        if spec.backend.kind == "local":
            _start_detached(folder, spec, variables)
        elif spec.backend.kind == "kubernetes":
            create(pod_job(folder.path, spec, environ, ranks=ranks))
        else:
            argv = sbatch_argv(folder.name, folder.path, spec, ranks=ranks)
            number = submit(argv, {**variables, "PYTHON": spec.python}, spec.folder)
            folder.write_spec(dataclasses.replace(spec, slurm_job=number))
    except (OSError, subprocess.SubprocessError) as error:
        raise JobError(f"job {folder.name} can't be handed over: {error}") from None


def _start_detached(folder: JobFolder, spec: JobSpec, environ: Mapping[str, str]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with open(os.open(folder.words, flags, 0o600), "wb") as words:
        subprocess.run(
            [spec.python, "-m", "hvdtrain.jobs.detach", *_command(spec)],
            cwd=spec.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            timeout=START_TIMEOUT_S,
            check=True,
        )


def _environment(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the job's environment: the caller's variables, with settings of the job alone.

    A caller that is itself a rank of a job leaves nothing of that.
    """
    settings = {variable_name(entry.name) for entry in dataclasses.fields(Settings)}
    others = {name: value for name, value in environ.items() if name not in settings | _OF_RANKS}
    return {**others, **spec.variables}
