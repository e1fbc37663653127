"""The check that a job can be started as it is described: its plan, and the number of its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.backends import backend_of
from hvdtrain.jobs.naming import split_backend
from hvdtrain.jobs.spec import Backend, JobSpec
from hvdtrain.launch import cli as launch

__all__ = ["Planned", "changes_of", "planned"]


class Planned(NamedTuple):
    """A job that could be started.

    Attributes:
        ranks: How many ranks it asks for; None where it takes what there is.
        plan: What would be started, as ``JobBackend.plan`` says it.
    """

    ranks: int | None
    plan: str


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


def planned(folder: Path, spec: JobSpec, environ: Mapping[str, str]) -> Planned:
    """Check a job, which is not started.

    Args:
        folder: The folder that it has, or would have.
        spec: What is asked for.
        environ: This process's variables.

    Raises:
        ConfigurationError: It can't be started as it is described.
        JobError: That can't be told.
    """
    parser = _Parser(prog="hvdtrain run", allow_abbrev=False)
    launch.add_arguments(parser)
    arguments = parser.parse_args([*spec.options, "--", *spec.program])
    launch.program_of(arguments)
    ranks = arguments.num_proc
    return Planned(ranks, backend_of(spec).plan(folder, spec, environ, ranks=ranks))
