"""``hvdtrain jobs``: lists jobs and their states."""

from __future__ import annotations

import argparse
import json
import time

from hvdtrain.jobs.folder import JobFolder, all_jobs
from hvdtrain.jobs.job_view import JobView, command_line, view_jobs
from hvdtrain.jobs.naming import add_jobs_dir, directory_of
from hvdtrain.text import format_duration, format_table, plural

__all__ = ["add_arguments", "run"]

_LONGEST_PROGRAM = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain jobs``."""
    parser.usage = "hvdtrain jobs [--json] [--all] [--jobs-dir DIR]"
    parser.add_argument(
        "--json", action="store_true", help="a JSON object for each job, a line each"
    )
    parser.add_argument(
        "-n", "--newest", type=int, default=20, metavar="N", help="show the newest N; default 20"
    )
    parser.add_argument("--all", action="store_true", help="show all")
    add_jobs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the jobs, the newest first.

    Raises:
        JobError: Jobs have no folders here.
    """
    directory = directory_of(arguments)
    jobs = sorted(all_jobs(directory), key=_began, reverse=True)
    shown = jobs if arguments.all else jobs[: max(0, arguments.newest)]
    views = view_jobs(shown)
    if arguments.json:
        for view in views:
            print(json.dumps(view.to_json()))
        return 0
    if not jobs:
        print(f"no jobs in {directory}; hvdtrain run and hvdtrain submit make some")
        return 0
    now = time.time()
    head = ("job", "state", "ranks", "step", "began", "took", "program")
    print(format_table(head, [_row(view, now) for view in views], left=(0, 1, 6)))
    if len(jobs) > len(shown):
        print(f"and {plural(len(jobs) - len(shown), 'older job')} (--all)")
    return 0


def _began(job: JobFolder) -> float:
    return job.created_s()


def _row(view: JobView, now: float) -> tuple[str, ...]:
    ends = now if view.ended_s is None else view.ended_s
    program = command_line(view.spec.program)
    short = program if len(program) <= _LONGEST_PROGRAM else program[: _LONGEST_PROGRAM - 3] + "..."
    return (
        view.name,
        view.status,
        str(view.state.ranks or "-"),
        "-" if view.state.step is None else str(view.state.step),
        f"{format_duration(now - view.created_s)} ago",
        format_duration(ends - view.created_s),
        short,
    )
