"""Hands jobs over to what runs them."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain.errors import JobError
from hvdtrain.jobs.backends import backend_of
from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.job_view import view_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

__all__ = ["hand_over", "start_again", "submit_job"]


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
        known = view.status != "unknown"
        state = view.status if known else f"in a state that is not known ({view.verdict})"
        where = " and may still run" if view.status in ("silent", "unknown") else ""
        stop = f"hvdtrain stop {folder.name} ends it, " if known else ""
        raise JobError(
            f"{folder.name} is {state}{where}; only what has ended starts again. "
            f"{stop}hvdtrain clone {folder.name} makes another."
        )
    spec = changed(folder.spec())
    hand_over(folder, spec, environ, ranks=ranks_of(spec))


def hand_over(
    folder: JobFolder, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
) -> None:
    """Give a job to what runs it in its turn, whatever becomes of this process.

    Args:
        folder: The job's folder, which is queued then.
        spec: What is asked for; it is written there.
        environ: This process's variables.
        ranks: How many there are; None for as many as there is room for.

    Raises:
        JobError: It can't be handed over.
    """
    try:
        folder.write_spec(spec)
        while folder.take_stop() is not None:
            # Of somebody who wanted the run before to end, which has heard nothing of it.
            pass
        before = folder.state() or JobState(phase="queued")
        folder.write_state(dataclasses.replace(before, phase="queued", launcher=None))
        backend_of(spec).hand_over(folder, spec, environ, ranks=ranks)
    except (OSError, subprocess.SubprocessError) as error:
        raise JobError(f"job {folder.name} can't be handed over: {error}") from None
