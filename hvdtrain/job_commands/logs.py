"""``hvdtrain logs``: what the ranks of a job have said, and go on to say."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable

from hvdtrain.cluster.ranges import parse_runs
from hvdtrain.config.fields import argument, count
from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import catch_up, view_job
from hvdtrain.jobs.log_format import LAUNCHER, LogLine
from hvdtrain.jobs.log_reader import Found, fits, log_end, read_last, read_log
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
    ranks, wanted = arguments.rank, _wanted(arguments.grep, arguments.regex)
    job = named_job(arguments)
    catch_up(job)
    begin = 0
    found: Iterable[Found] = ()
    if arguments.lines is None:
        found = read_log(job.log, ranks=ranks, wanted=wanted)
    elif arguments.lines:
        found = read_last(job.log, arguments.lines, ranks=ranks, wanted=wanted)
    else:
        begin = log_end(job.log)
    for one in found:
        begin = one.end
        _print(one, with_time=arguments.time)
    if arguments.follow:
        _follow(job, begin, lambda line: fits(line, ranks, wanted), with_time=arguments.time)
    return 0


def _follow(
    job: JobFolder, begin: int, shown: Callable[[LogLine], bool], *, with_time: bool
) -> None:
    """Print what comes until the job is over."""
    is_over, doubt = False, ""
    while not is_over:
        sys.stdout.flush()
        time.sleep(POLL_S)
        # Asked before the log is read, so that nothing comes behind it.
        view = view_job(job)
        is_over = view.is_over
        if view.doubt not in ("", doubt):
            doubt = view.doubt
            LOGGER.warning("%s", doubt)
        for one in read_log(job.log, begin):
            begin = one.end
            if one.line is None or shown(one.line):
                _print(one, with_time=with_time)


def _print(found: Found, *, with_time: bool) -> None:
    line = found.line
    if line is None:
        print(f"... {(found.end - found.begin) / 2**20:.1f} MiB of the log are not kept ...")
        return
    at = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(line.time_s))} " if with_time else ""
    who = "hvdtrain run:" if line.rank == LAUNCHER else f"[{line.rank}]"
    text = f"{at}{who} {line.text}"
    try:
        print(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding))


def _wanted(text: str | None, pattern: str | None) -> Callable[[str], bool] | None:
    tests: list[Callable[[str], object]] = []
    if text is not None:
        tests.append(lambda line: text in line)
    if pattern is not None:
        try:
            tests.append(re.compile(pattern).search)
        except re.error as error:
            raise ConfigurationError(
                f"--regex {pattern!r} is no regular expression: {error}. Use --grep for text."
            ) from None
    return (lambda line: all(test(line) for test in tests)) if tests else None
