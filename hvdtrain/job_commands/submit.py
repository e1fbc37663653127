"""``hvdtrain submit``: hands a job over and returns at once."""

from __future__ import annotations

import argparse
import os

from hvdtrain.jobs.naming import directory_of
from hvdtrain.jobs.submission import check_options, new_job, start_detached
from hvdtrain.launch import cli as launch

__all__ = ["add_arguments", "arguments_of_file", "run"]

arguments_of_file = launch.arguments_of_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain submit``: those of ``hvdtrain run``."""
    launch.add_arguments(parser)
    parser.usage = "hvdtrain submit [options of hvdtrain run] [--] program [argument ...]"
    parser.epilog = _EPILOG


_EPILOG = """\
The job waits until as many slots are free as it has ranks: a GPU each, or where there is none a
core. It runs in the background, whatever becomes of this terminal; hvdtrain jobs, show, logs -f,
stop, restart and clone see and steer it.
"""


def run(arguments: argparse.Namespace) -> int:
    """Submit the job that ``arguments`` describe, and print its name.

    Raises:
        ConfigurationError: The job can't be started as it is described.
        JobError: It can't be handed over.
    """
    spec = launch.spec_of(arguments, os.environ)
    plan = check_options(spec, os.environ)
    if arguments.dry_run:
        print(plan, end="")
        return 0
    job = new_job(directory_of(arguments), spec)
    start_detached(job, spec, os.environ)
    print(job.name)
    return 0
