"""Requests for jobs, from specifications and command lines."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.backend import JobRequest
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.naming import split_backend
from hvdtrain.jobs.spec import Backend, JobSpec
from hvdtrain.launch import cli as launch

__all__ = ["changes_of", "new_job_request", "request_for"]


def changes_of(arguments: argparse.Namespace) -> tuple[list[str], Backend | None]:
    """Return the changes that are asked for, as ``split_backend`` returns them.

    Raises:
        ConfigurationError: A file of options can't be read.
    """
    words: list[str] = arguments.changes
    before = arguments.argv[: len(arguments.argv) - len(words)]
    # argparse takes it away where it stands first.
    return split_backend(launch.with_files(["--", *words] if before[-1:] == ["--"] else words))


class _Parser(argparse.ArgumentParser):
    """One that does not end the process, which may be a page's."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong."""
        raise ConfigurationError(message)


def request_for(job: JobFolder, spec: JobSpec, environ: Mapping[str, str]) -> JobRequest:
    """Return the request for a job, whose options are checked.

    Args:
        job: Its folder; next to it if it is a new job.
        spec: Its specification.
        environ: This process's variables.

    Raises:
        ConfigurationError: The options or the program are not valid.
    """
    parser = _Parser(prog="hvdtrain run", allow_abbrev=False)
    launch.add_arguments(parser)
    arguments = parser.parse_args([*spec.options, "--", *spec.program])
    launch.program_of(arguments)
    return JobRequest(job=job, spec=spec, environ=environ, ranks=arguments.num_proc)


def new_job_request(directory: Path, spec: JobSpec, environ: Mapping[str, str]) -> JobRequest:
    """Return the request for a new job in a directory; see ``request_for``."""
    return request_for(JobFolder(directory / "NAME"), spec, environ)
