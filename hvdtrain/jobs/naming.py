"""Command-line arguments that name jobs and queues."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import JOBS_DIR, JobFolder, all_jobs, find_job, jobs_directory
from hvdtrain.jobs.kubernetes.pod_options import add_pod_options
from hvdtrain.jobs.spec import LOCAL, Backend, BackendKind

__all__ = [
    "add_backend",
    "add_changes",
    "add_jobs_dir",
    "add_name",
    "directory_of",
    "named_job",
    "split_backend",
]


def add_jobs_dir(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the argument for the directory of jobs."""
    parser.add_argument(
        "--jobs-dir",
        metavar="DIR",
        help="folder for the records of jobs; default ~/.local/state/hvdtrain/jobs",
    )


def add_name(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Declare the arguments for a job and for the directory of jobs."""
    action = parser.add_argument(
        "name",
        metavar="NAME",
        nargs="+" if several else None,
        help="a job, by its name or the beginning of it (hvdtrain jobs lists them)",
    )
    # For argcomplete.
    action.completer = _complete_names  # type: ignore[attr-defined]
    add_jobs_dir(parser)


def _complete_names(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the names of all jobs."""
    try:
        return [job.name for job in all_jobs(directory_of(parsed_args))]
    except JobError:
        return []


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for changes to a job."""
    parser.add_argument(
        "changes",
        nargs=argparse.REMAINDER,
        metavar="CHANGE",
        help="options of hvdtrain run that override the job's own, and after -- another program",
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that choose a queue."""
    parser.add_argument(
        "--on",
        choices=get_args(BackendKind),
        help="this machine's queue, Slurm's, or pods of Kubernetes; default local",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        metavar="OPTION",
        help="an option of sbatch, as --sbatch=--partition=gpu; may be repeated",
    )
    add_pod_options(parser.add_argument_group("with --on kubernetes (docs/kubernetes.md)"))


def split_backend(words: Sequence[str]) -> tuple[list[str], Backend | None]:
    """Return the words without those of ``add_backend``, and the queue; None if none is named."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_backend(parser)
    at = list(words).index("--") if "--" in words else len(words)
    found, rest = parser.parse_known_args(words[:at])
    backend = None if found.on is None else LOCAL
    if found.on == "slurm" or found.sbatch:
        backend = Backend("slurm", tuple(found.sbatch or ()))
    elif found.on == "kubernetes" or found.pod_words:
        backend = Backend("kubernetes", tuple(found.pod_words or ()))
    return [*rest, *words[at:]], backend


def directory_of(arguments: argparse.Namespace) -> Path:
    """Return the directory of the folders of jobs.

    Raises:
        JobError: Jobs have no folders here.
    """
    given = {} if arguments.jobs_dir is None else {JOBS_DIR: arguments.jobs_dir}
    directory = jobs_directory({**os.environ, **given})
    if directory is None:
        raise JobError(
            f"jobs have no folders here: {JOBS_DIR} is empty, or there is no HOME. Name one with "
            "--jobs-dir."
        )
    return directory


def named_job(arguments: argparse.Namespace, name: str | None = None) -> JobFolder:
    """Return the named job.

    Raises:
        JobError: There is no such job, or more than one.
    """
    return find_job(directory_of(arguments), arguments.name if name is None else name)
