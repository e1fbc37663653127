"""``hvdtrain restart`` and ``hvdtrain clone``: run a job again, in its own folder or a new one."""

from __future__ import annotations

import argparse
import os

from hvdtrain.job_commands.arguments import (
    add_name,
    directory_of,
    make_request,
    named_job,
    new_job_request,
    split_backend,
)
from hvdtrain.jobs.spec import change_spec, secret_values
from hvdtrain.jobs.submission import restart_job, submit_job
from hvdtrain.launch import option_files

__all__ = ["add_arguments", "read_changes", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdtrain restart`` and ``hvdtrain clone``."""
    parser.usage = f"{parser.prog} NAME [options of hvdtrain run] [-- program [argument ...]]"
    add_name(parser)
    parser.add_argument(
        "changes",
        nargs=argparse.REMAINDER,
        metavar="CHANGE",
        help="options of hvdtrain run that override the job's, and a different program after --",
    )


def run(arguments: argparse.Namespace) -> int:
    """Restart a job that has ended, or submit a copy of a job. Print the name of the job."""
    job, directory = named_job(arguments), directory_of(arguments)
    changes, backend = split_backend(read_changes(arguments))
    environ = {**os.environ, **secret_values(changes)}
    if arguments.command == "clone":
        spec = change_spec(job.read_spec(), changes, backend)
        job = submit_job(new_job_request(directory, spec, environ))
    else:
        restart_job(
            job, lambda spec: make_request(job, change_spec(spec, changes, backend), environ)
        )
    print(job.name)
    return 0


def read_changes(arguments: argparse.Namespace) -> list[str]:
    """Return the changes to a job, with option files replaced by their contents.

    Raises:
        ConfigurationError: If an option file can't be read.
    """
    words: list[str] = arguments.changes
    before = arguments.argv[: len(arguments.argv) - len(words)]
    # argparse drops "--" if it is the first word.
    return option_files.with_files(["--", *words] if before[-1:] == ["--"] else words)
