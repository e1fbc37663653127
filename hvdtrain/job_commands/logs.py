"""``hvdtrain logs``: what the ranks of a job have said, and go on to say."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence

from hvdtrain.cluster.ranges import parse_runs
from hvdtrain.config.fields import argument, count
from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import catch_up, view_job
from hvdtrain.jobs.log import LAUNCHER, LogEntry, LogLine, log_end, read_before, read_log
from hvdtrain.jobs.naming import add_name, named_job

__all__ = ["add_arguments", "run"]

LOGGER = logging.getLogger(__name__)
POLL_S = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain logs``."""
    parser.usage = "hvdtrain logs NAME [-f] [-n N] [--rank 0-3] [--grep TEXT]"
    add_name(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more until it ends")
    parser.add_argument(
        "-n", "--lines", type=argument(count), metavar="N", help="the last N lines alone"
    )
    parser.add_argument(
        "--rank", type=argument(parse_runs), metavar="R", help="of these ranks, like 0-3,7"
    )
    parser.add_argument("--grep", metavar="TEXT", help="lines that hold TEXT, as it stands")
    parser.add_argument("--regex", metavar="RE", help="lines in which Python's RE is found")
    parser.add_argument("-t", "--time", action="store_true", help="with the time of each line")


def run(arguments: argparse.Namespace) -> int:
    """Print a job's log.

    Raises:
        JobError: There is no such job.
        ConfigurationError: A regular expression that is none.
    """
    wanted = _wanted(arguments.rank, arguments.grep, arguments.regex)
    job = named_job(arguments)
    catch_up(job)
    begin = 0
    if arguments.lines is not None:
        part = read_before(job.log, log_end(job.log), arguments.lines, wanted)
        for entry in part.entries:
            _print(entry, with_time=arguments.time)
        begin = part.end
    if arguments.lines is None or arguments.follow:
        _print_from(job, begin, wanted, with_time=arguments.time, follow=arguments.follow)
    return 0


def _print_from(
    job: JobFolder,
    begin: int,
    wanted: Callable[[LogLine], bool],
    *,
    with_time: bool,
    follow: bool,
) -> None:
    """Print matching lines from a position to the end; with ``follow`` until the job is over."""
    is_over, doubt = not follow, ""
    while True:
        for entry in read_log(job.log, begin):
            begin = entry.end
            if entry.line is None or wanted(entry.line):
                _print(entry, with_time=with_time)
        if is_over:
            return
        sys.stdout.flush()
        time.sleep(POLL_S)
        # Read before the log, so that nothing comes after it.
        view = view_job(job)
        is_over = view.is_over
        if view.doubt not in ("", doubt):
            doubt = view.doubt
            LOGGER.warning("%s", doubt)


def _print(entry: LogEntry, *, with_time: bool) -> None:
    line = entry.line
    if line is None:
        print(f"... {(entry.end - entry.begin) / 2**20:.1f} MiB of the log are not kept ...")
        return
    at = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(line.time_s))} " if with_time else ""
    who = "hvdtrain run:" if line.rank == LAUNCHER else f"[{line.rank}]"
    text = f"{at}{who} {line.text}"
    try:
        print(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding))


def _wanted(
    ranks: Sequence[range] | None, text: str | None, pattern: str | None
) -> Callable[[LogLine], bool]:
    """Return the test for lines of ``ranks`` that contain ``text`` and match ``pattern``."""
    try:
        expression = re.compile(pattern or "")
    except re.error as error:
        raise ConfigurationError(
            f"--regex {pattern!r} is not a valid regular expression: {error}. Use --grep for text."
        ) from None
    return lambda line: (
        (ranks is None or any(line.rank in run for run in ranks))
        and (text or "") in line.text
        and expression.search(line.text) is not None
    )
