"""``hvdtrain jobs``: lists jobs and their states."""

from __future__ import annotations

import argparse
import json
import time

from hvdtrain.job_commands.arguments import add_jobs_dir, directory_of
from hvdtrain.job_commands.show import command_line
from hvdtrain.jobs.folder import JobFolder, all_jobs
from hvdtrain.jobs.job_view import JobView, view_jobs
from hvdtrain.text import format_duration, format_table, plural

__all__ = ["add_arguments", "run"]

_MOST_CHARACTERS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdtrain jobs``."""
    parser.usage = "hvdtrain jobs [-n N | --all] [--json] [--jobs-dir DIR]"
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument(
        "-n",
        "--newest",
        type=int,
        default=20,
        metavar="N",
        help="list only the N newest jobs; default %(default)d",
    )
    parser.add_argument("--all", action="store_true", help="list all jobs")
    add_jobs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the jobs, the newest first."""
    directory = directory_of(arguments)
    jobs = sorted(all_jobs(directory), key=JobFolder.created_s, reverse=True)
    shown = jobs if arguments.all else jobs[: max(0, arguments.newest)]
    views = view_jobs(shown)
    if arguments.json:
        for view in views:
            print(json.dumps(view.to_json()))
        return 0
    if not jobs:
        print(f"no jobs in {directory}; start one with hvdtrain run or hvdtrain submit")
        return 0
    now = time.time()
    head = ("job", "state", "ranks", "step", "submitted", "duration", "program")
    print(format_table(head, [_row(view, now) for view in views], left=(0, 1, 6)))
    if len(jobs) > len(shown):
        print(f"and {plural(len(jobs) - len(shown), 'older job')}; --all lists all jobs")
    return 0


def _row(view: JobView, now: float) -> tuple[str, ...]:
    end = now if view.ended_s is None else view.ended_s
    program = command_line(view.spec.program)
    if len(program) > _MOST_CHARACTERS:
        program = program[: _MOST_CHARACTERS - 3] + "..."
    return (
        view.name,
        view.status,
        str(view.state.ranks or "-"),
        "-" if view.state.step is None else str(view.state.step),
        f"{format_duration(now - view.created_s)} ago",
        format_duration(end - view.created_s),
        program,
    )
