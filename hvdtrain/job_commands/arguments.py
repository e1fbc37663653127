"""Command-line arguments for jobs and queues, and the requests made from the arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, get_args

from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs.folder import (
    JOBS_DIR,
    JobFolder,
    JobRequest,
    all_jobs,
    find_job,
    jobs_directory,
)
from hvdtrain.jobs.kubernetes.pod_options import add_pod_options
from hvdtrain.jobs.spec import LOCAL, Backend, BackendKind, JobSpec
from hvdtrain.launch import cli as launch

__all__ = [
    "add_backend",
    "add_jobs_dir",
    "add_name",
    "directory_of",
    "make_request",
    "named_job",
    "new_job_request",
    "split_backend",
]


def add_jobs_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option for the directory that contains the job folders."""
    parser.add_argument(
        "--jobs-dir",
        metavar="DIR",
        help="folder of the job records; default ~/.local/state/hvdtrain/jobs",
    )


def add_name(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the arguments for the name of a job (or several) and for the directory of jobs."""
    action = parser.add_argument(
        "name",
        metavar="NAME",
        nargs="+" if several else None,
        help="name of a job or a unique prefix; see hvdtrain jobs",
    )
    # argcomplete calls this function.
    action.completer = _complete_names  # type: ignore[attr-defined]
    add_jobs_dir(parser)


def _complete_names(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    try:
        return [job.name for job in all_jobs(directory_of(parsed_args))]
    except JobError:
        return []


def directory_of(arguments: argparse.Namespace) -> Path:
    """Return the directory that contains the job folders.

    Raises:
        JobError: If jobs are not recorded.
    """
    given = {} if arguments.jobs_dir is None else {JOBS_DIR: arguments.jobs_dir}
    directory = jobs_directory({**os.environ, **given})
    if directory is None:
        raise JobError(
            f"jobs are not recorded because {JOBS_DIR} is empty or HOME is not set; use --jobs-dir."
        )
    return directory


def named_job(arguments: argparse.Namespace, name: str | None = None) -> JobFolder:
    """Return the folder of the job called ``name``, by default ``arguments.name``."""
    return find_job(directory_of(arguments), arguments.name if name is None else name)


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a queue."""
    parser.add_argument(
        "--on",
        choices=get_args(BackendKind),
        help="queue: this machine, Slurm or Kubernetes; default local",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        metavar="OPTION",
        help="option of sbatch, such as --sbatch=--partition=gpu; may be repeated",
    )
    add_pod_options(parser.add_argument_group("with --on kubernetes (docs/kubernetes.md)"))


def split_backend(words: Sequence[str]) -> tuple[list[str], Backend | None]:
    """Separate the options of ``add_backend`` from all other words.

    Returns:
        The other words, and the queue that the options choose. The queue is None if none of the
        options is given.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_backend(parser)
    at = list(words).index("--") if "--" in words else len(words)
    arguments, rest = parser.parse_known_args(words[:at])
    backend = None if arguments.on is None else LOCAL
    if arguments.on == "slurm" or arguments.sbatch:
        backend = Backend("slurm", tuple(arguments.sbatch or ()))
    elif arguments.on == "kubernetes" or arguments.pod_words:
        backend = Backend("kubernetes", tuple(arguments.pod_words or ()))
    return [*rest, *words[at:]], backend


class _Parser(argparse.ArgumentParser):
    """A parser that raises errors instead of exiting, because the process may be a server."""

    def error(self, message: str) -> NoReturn:
        """Raise a ``ConfigurationError`` with this message."""
        raise ConfigurationError(message)


def make_request(job: JobFolder, spec: JobSpec, environ: Mapping[str, str]) -> JobRequest:
    """Check the options of a job and return the request for it.

    Raises:
        ConfigurationError: If the options or the program are not valid.
    """
    parser = _Parser(prog="hvdtrain run", allow_abbrev=False)
    launch.add_arguments(parser)
    arguments = parser.parse_args([*spec.options, "--", *spec.program])
    launch.get_program(arguments)
    return JobRequest(job=job, spec=spec, environ=environ, ranks=arguments.num_proc)


def new_job_request(directory: Path, spec: JobSpec, environ: Mapping[str, str]) -> JobRequest:
    """Check the options of a new job, and return the request to create the job in ``directory``."""
    return make_request(JobFolder(directory / "NAME"), spec, environ)
