"""``hvdtrain clone``: submits another job like one that there is."""

from __future__ import annotations

import argparse
import os

from hvdtrain.job_commands.planned import changes_of, planned
from hvdtrain.jobs.naming import add_changes, add_name, directory_of, named_job
from hvdtrain.jobs.spec import secret_values, with_changes
from hvdtrain.jobs.submission import submit_job

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain clone``."""
    parser.usage = "hvdtrain clone NAME [options of hvdtrain run] [-- program [argument ...]]"
    add_name(parser)
    add_changes(parser)


def run(arguments: argparse.Namespace) -> int:
    """Submit a job like another one, and print its name.

    Raises:
        JobError: There is no such job, or another can't be handed over.
        ConfigurationError: The changes can't be made.
    """
    words, backend = changes_of(arguments)
    spec = with_changes(named_job(arguments).spec(), words, backend)
    environ = {**os.environ, **secret_values(words)}
    directory = directory_of(arguments)
    ranks = planned(directory / "NAME", spec, environ).ranks
    job = submit_job(directory, spec, environ, ranks=ranks)
    print(job.name)
    return 0
