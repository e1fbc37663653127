"""``hvdtrain restart`` and ``hvdtrain clone``: run a job again, in its folder or as another job."""

from __future__ import annotations

import argparse
import os

from hvdtrain.job_commands.requests import changes_of, new_job_request, request_for
from hvdtrain.jobs.naming import add_changes, add_name, directory_of, named_job
from hvdtrain.jobs.spec import secret_values, with_changes
from hvdtrain.jobs.submission import start_again, submit_job

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain restart`` and ``hvdtrain clone``."""
    parser.usage = f"{parser.prog} NAME [options of hvdtrain run] [-- program [argument ...]]"
    add_name(parser)
    add_changes(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start a job that has ended again, or submit another one like it; print its name.

    Raises:
        JobError: There is no such job, it has not ended, or it can't be started.
        ConfigurationError: The changes are not valid.
    """
    job, directory = named_job(arguments), directory_of(arguments)
    words, backend = changes_of(arguments)
    environ = {**os.environ, **secret_values(words)}
    if arguments.command == "clone":
        spec = with_changes(job.spec(), words, backend)
        job = submit_job(new_job_request(directory, spec, environ))
    else:
        start_again(job, lambda spec: request_for(job, with_changes(spec, words, backend), environ))
    print(job.name)
    return 0
