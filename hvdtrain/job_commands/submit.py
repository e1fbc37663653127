"""``hvdtrain submit``: queues a job and returns at once."""

from __future__ import annotations

import argparse
import dataclasses
import os

from hvdtrain.job_commands.arguments import (
    add_backend,
    directory_of,
    new_job_request,
    split_backend,
)
from hvdtrain.job_commands.run import spec_of
from hvdtrain.jobs.backends import backend_for
from hvdtrain.jobs.spec import LOCAL, secret_values
from hvdtrain.jobs.submission import submit_job
from hvdtrain.launch import cli as launch

__all__ = ["add_arguments", "run", "with_files"]

with_files = launch.with_files
_EPILOG = """\
The job waits until enough slots are free for its ranks: one GPU each, or one core on a machine
without GPUs. It runs in the background and outlives this terminal. Use hvdtrain jobs, show, logs,
stop, restart and clone to follow and control it. With --on slurm, the job waits in Slurm's queue.
With --on kubernetes, it waits until the cluster has room (docs/kubernetes.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdtrain submit``, including the arguments of ``hvdtrain run``."""
    launch.add_arguments(parser)
    add_backend(parser)
    parser.usage = (
        "hvdtrain submit [--on slurm|kubernetes] [options of hvdtrain run] [--] program ..."
    )
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> int:
    """Submit a job and print its name."""
    spec = spec_of(arguments, os.environ)
    options, backend = split_backend([word for word in spec.options if word != "--dry-run"])
    spec = dataclasses.replace(spec, options=tuple(options), backend=backend or LOCAL)
    words = arguments.argv[: len(arguments.argv) - len(arguments.program)]
    environ = {**os.environ, **secret_values(words)}
    request = new_job_request(directory_of(arguments), spec, environ)
    if arguments.dry_run:
        print(backend_for(spec).plan(request).preview(), end="")
    else:
        print(submit_job(request).name)
    return 0
