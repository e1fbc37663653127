"""The check that a job can be started as it is described, and the number of its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.submission import check_options
from hvdtrain.launch import cli as launch

__all__ = ["checked_ranks"]


def checked_ranks(spec: JobSpec, environ: Mapping[str, str]) -> int | None:
    """Check a job, and return how many ranks it asks for; None where it takes what there is.

    Raises:
        ConfigurationError: It can't be started as it is described.
        JobError: That can't be told.
        SystemExit: Options that hvdtrain run does not know.
    """
    parser = argparse.ArgumentParser(prog="hvdtrain run", allow_abbrev=False)
    launch.add_arguments(parser)
    arguments = parser.parse_args([*spec.options, "--", *spec.program])
    if spec.backend.kind == "local":
        check_options(spec, environ)
    ranks: int | None = arguments.num_proc
    return ranks
