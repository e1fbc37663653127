"""``hvdtrain stop``: stops jobs, with a checkpoint on request."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence

from hvdtrain.errors import JobError
from hvdtrain.jobs.backends import queue_of
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import JobView, view_job
from hvdtrain.jobs.naming import add_name, named_job
from hvdtrain.jobs.spec import JobSpec

__all__ = ["add_arguments", "run", "stop_job"]

LOGGER = logging.getLogger(__name__)
POLL_S = 0.1
MOST_POLL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain stop``."""
    parser.usage = "hvdtrain stop NAME [NAME ...] [--save] [--wait S]"
    add_name(parser, several=True)
    parser.add_argument(
        "--save", action="store_true", help="let ranks with hvdtrain.Checkpoint save one first"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="how long to wait for the end, in seconds; default %(default)g",
    )


def run(arguments: argparse.Namespace) -> int:
    """Stop jobs; return 1 if one has not ended in time or can't be reached.

    Raises:
        JobError: There is no such job.
    """
    told, untold = [], []
    for job in [named_job(arguments, name) for name in arguments.name]:
        if (view := view_job(job)).is_over:
            print(f"{job.name} has ended already: {view.status}")
            continue
        try:
            stop_job(job, view, save=arguments.save)
            told.append(job)
        except JobError as error:
            untold.append(job)
            LOGGER.error("%s", error)
    left = _await_ends(told, arguments.wait)
    for job in told:
        print(f"{job.name}: {'still ' if job in left else ''}{view_job(job).status}")
    return 1 if left or untold else 0


def stop_job(job: JobFolder, view: JobView, *, save: bool) -> None:
    """Ask a job that is not over to stop, which may take a while.

    Args:
        job: The job.
        view: Its view.
        save: Whether its ranks save a checkpoint first.

    Raises:
        JobError: The job can't be reached.
    """
    view.require_known()
    try:
        spec = _spec(job)
        queue_of(spec).cancel(job, spec, is_queued=view.status == "queued", save=save)
    except OSError as error:
        raise JobError(f"{job.name} can't be stopped: {error.strerror}") from None


def _spec(job: JobFolder) -> JobSpec:
    """Return the specification; an empty one if it can't be read, as a launcher here can end."""
    try:
        return job.spec()
    except JobError:
        return JobSpec(options=(), program=(), folder="")


def _await_ends(jobs: Sequence[JobFolder], timeout_s: float) -> list[JobFolder]:
    began = time.monotonic()
    while True:
        left = [job for job in jobs if not view_job(job).is_over]
        waited_s = time.monotonic() - began
        if not left or waited_s > timeout_s:
            return left
        # A queue may have to be asked each time.
        time.sleep(min(MOST_POLL_S, max(POLL_S, waited_s / 10)))
