"""Hands jobs over to what runs them."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain.errors import JobError
from hvdtrain.jobs.backends import backend_of
from hvdtrain.jobs.files import try_lock
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
        JobError: It has not ended, another process restarts it, or it can't be handed over.
    """
    try:
        # Held until the job is queued: another process then sees that it has not ended.
        with try_lock(folder.restart_lock) as lock:
            if lock is None:
                raise JobError(f"{folder.name} is being restarted by another process.")
            view = view_job(folder)
            view.require_known()
            if not view.is_over:
                where = " and may still run" if view.status == "silent" else ""
                raise JobError(
                    f"{folder.name} is {view.status}{where}; only what has ended starts again. "
                    f"hvdtrain stop {folder.name} ends it, "
                    f"hvdtrain clone {folder.name} makes another."
                )
            spec = changed(folder.spec())
            hand_over(folder, spec, environ, ranks=ranks_of(spec))
    except OSError as error:
        raise JobError(f"{folder.restart_lock} can't be locked: {error.strerror}") from None


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
