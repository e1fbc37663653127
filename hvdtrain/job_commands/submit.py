"""``hvdtrain submit``: queues a job and returns at once."""

from __future__ import annotations

import argparse
import dataclasses
import os

from hvdtrain.job_commands.requests import new_job_request
from hvdtrain.job_commands.run import spec_of
from hvdtrain.jobs.backends import backend_of
from hvdtrain.jobs.naming import add_backend, directory_of, split_backend
from hvdtrain.jobs.spec import LOCAL, secret_values
from hvdtrain.jobs.submission import submit_job
from hvdtrain.launch import cli as launch

__all__ = ["add_arguments", "run", "with_files"]

with_files = launch.with_files
_EPILOG = """\
The job waits until as many slots are free as it has ranks: a GPU each, or a core on a machine
without GPUs. It runs in the background and outlives this terminal; hvdtrain jobs, show, logs -f,
stop, restart and clone show and control it. With --on slurm it waits in Slurm's queue instead, with
--on kubernetes for room on a cluster (docs/kubernetes.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain submit``: those of ``hvdtrain run``, and its own."""
    launch.add_arguments(parser)
    add_backend(parser)
    parser.usage = (
        "hvdtrain submit [--on slurm|kubernetes] [options of hvdtrain run] [--] program ..."
    )
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> int:
    """Submit the job that ``arguments`` describe, and print its name.

    Raises:
        ConfigurationError: The job can't be started as it is described.
        JobError: It can't be submitted.
    """
    spec = spec_of(arguments, os.environ)
    options, backend = split_backend(spec.options)
    options = [word for word in options if word != "--dry-run"]
    spec = dataclasses.replace(spec, options=tuple(options), backend=backend or LOCAL)
    directory = directory_of(arguments)
    words = arguments.argv[: len(arguments.argv) - len(arguments.program)]
    environ = {**os.environ, **secret_values(words)}
    request = new_job_request(directory, spec, environ)
    if arguments.dry_run:
        print(backend_of(spec).plan(request).preview(), end="")
        return 0
    job = submit_job(request)
    print(job.name)
    return 0
