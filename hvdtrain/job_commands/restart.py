"""``hvdtrain restart``: a job that has ended goes on, from its checkpoint if it has one."""

from __future__ import annotations

import argparse
import os

from hvdtrain.job_commands.planned import changes_of, planned
from hvdtrain.jobs.naming import add_changes, add_name, named_job
from hvdtrain.jobs.spec import secret_values, with_changes
from hvdtrain.jobs.submission import start_again

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain restart``."""
    parser.usage = "hvdtrain restart NAME [options of hvdtrain run] [-- program [argument ...]]"
    add_name(parser)
    add_changes(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start a job again, in its folder.

    Raises:
        JobError: There is no such job, it has not ended, or it can't be started.
        ConfigurationError: The changes can't be made.
    """
    job = named_job(arguments)
    words, backend = changes_of(arguments)
    environ = {**os.environ, **secret_values(words)}
    start_again(
        job,
        lambda spec: with_changes(spec, words, backend),
        lambda spec: planned(job.path, spec, environ).ranks,
        environ,
    )
    print(job.name)
    return 0
