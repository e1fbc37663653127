"""``hvdtrain stop``: stops jobs, after saving a checkpoint if requested."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence

from hvdtrain.errors import JobError
from hvdtrain.job_commands.arguments import add_name, named_job
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import view_job
from hvdtrain.jobs.submission import stop_job

__all__ = ["add_arguments", "run"]

LOGGER = logging.getLogger(__name__)
POLL_S = 0.1
MOST_POLL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdtrain stop``."""
    parser.usage = "hvdtrain stop NAME [NAME ...] [--save] [--wait S]"
    add_name(parser, several=True)
    parser.add_argument(
        "--save",
        action="store_true",
        help="let the ranks save a checkpoint first, if they use hvdtrain.Checkpoint",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait until the jobs have ended; default %(default)g",
    )


def run(arguments: argparse.Namespace) -> int:
    """Stop jobs; return 1 if a job has not ended in time or can't be reached."""
    stopping, has_failed = [], False
    for job in [named_job(arguments, name) for name in arguments.name]:
        if (view := view_job(job)).is_over:
            print(f"{job.name} has already ended: {view.status}")
            continue
        try:
            stop_job(job, view, save=arguments.save)
            stopping.append(job)
        except JobError as error:
            has_failed = True
            LOGGER.error("%s", error)
    running = _wait(stopping, arguments.wait)
    for job in stopping:
        print(f"{job.name}: {'still ' if job in running else ''}{view_job(job).status}")
    return 1 if running or has_failed else 0


def _wait(jobs: Sequence[JobFolder], timeout_s: float) -> list[JobFolder]:
    """Wait until all jobs have ended; return the jobs that still run after ``timeout_s``."""
    started = time.monotonic()
    while True:
        running = [job for job in jobs if not view_job(job).is_over]
        waited_s = time.monotonic() - started
        if not running or waited_s > timeout_s:
            return running
        # Each check may send a request to a queue.
        time.sleep(min(MOST_POLL_S, max(POLL_S, waited_s / 10)))
