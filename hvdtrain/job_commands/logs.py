"""``hvdtrain logs``: prints or follows the output of a job's ranks."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from hvdtrain.config.fields import argument, count
from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.job_commands.arguments import add_name, named_job
from hvdtrain.jobs.backends import queue_for
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import view_job
from hvdtrain.jobs.log import LAUNCHER, LogEntry, LogLine, log_end, read_before, read_log
from hvdtrain.text import parse_ranges

__all__ = ["add_arguments", "run"]

LOGGER = logging.getLogger(__name__)
POLL_S = 0.3
QUEUE_POLL_S = 1.0
# A line of one or more ranks as hvdtrain run prints it, with an optional time. Long lists of ranks
# are abbreviated: "[0,2,4,... 5 ranks] text".
_RANK_LINE = re.compile(
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )?"
    r"\[ *(?P<ranks>[\d,-]+)(?P<more>,\.{3} \d+ ranks)?(?: [^]]*)?\] (?P<text>.*)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdtrain logs``."""
    parser.usage = "hvdtrain logs NAME [-f] [-n N] [-t] [--rank 0-3] [--grep TEXT]"
    add_name(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new lines until the job ends"
    )
    parser.add_argument(
        "-n", "--lines", type=argument(count), metavar="N", help="print only the last N lines"
    )
    parser.add_argument(
        "--rank", type=argument(parse_ranges), metavar="R", help="ranks to print, such as 0-3,7"
    )
    parser.add_argument("--grep", metavar="TEXT", help="print only lines that contain TEXT")
    parser.add_argument(
        "--regex", metavar="RE", help="print only lines that match a Python regular expression"
    )
    parser.add_argument("-t", "--time", action="store_true", help="print the time of each line")


def run(arguments: argparse.Namespace) -> int:
    """Print a job's log."""
    matches = _line_filter(arguments.rank, arguments.grep, arguments.regex)
    job = named_job(arguments)
    if (queue_lines := _queue_lines(job, "")) is not None:
        lines, poll_s = _queue_log(job, queue_lines, arguments), QUEUE_POLL_S
    else:
        lines, poll_s = _folder_log(job, arguments.lines, matches, arguments.time), POLL_S
    is_over, doubt = not arguments.follow, ""
    for text in lines:
        if text is not None:
            _write(text)
            continue
        if is_over:
            break
        sys.stdout.flush()
        time.sleep(poll_s)
        # The status is checked before the log is read again, so that no line is missed.
        view = view_job(job)
        is_over = view.is_over
        if view.doubt not in ("", doubt):
            doubt = view.doubt
            LOGGER.warning("%s", doubt)
    return 0


def _folder_log(
    job: JobFolder, last: int | None, matches: Callable[[LogLine], bool], with_time: bool
) -> Iterator[str | None]:
    """Yield the text of matching lines, and None at the current end of the log."""
    begin = 0
    if last is not None:
        part = read_before(job.log, log_end(job.log), last, matches)
        yield from (_format(entry, with_time) for entry in part.entries)
        yield None
        begin = part.end
    while True:
        for entry in read_log(job.log, begin):
            begin = entry.end
            if entry.line is None or matches(entry.line):
                yield _format(entry, with_time)
        yield None


def _queue_lines(job: JobFolder, after: str) -> Sequence[tuple[str, str]] | None:
    """Return times and texts of the queue's log; None if the log is in the job's folder."""
    try:
        spec = job.read_spec()
    except JobError:
        return None
    return queue_for(spec).log_lines(job, spec, after)


def _queue_log(
    job: JobFolder, lines: Sequence[tuple[str, str]], arguments: argparse.Namespace
) -> Iterator[str | None]:
    """Yield matching lines as ``hvdtrain run`` printed them, and None at the current end."""
    matches = _line_filter(None, arguments.grep, arguments.regex)
    after, reported, last = "", "", arguments.lines
    while True:
        after = lines[-1][0] if lines else after
        found = [(at, text) for at, text in lines if _matches(text, arguments.rank, matches)]
        for at, text in found if last is None else found[max(0, len(found) - last) :]:
            when = _clock(datetime.fromisoformat(at).timestamp()) if arguments.time else ""
            yield f"{when}{text}"
        yield None
        last = None
        try:
            lines = _queue_lines(job, after) or ()
        except JobError as error:
            if view_job(job).is_over:
                raise
            if str(error) != reported:
                reported = str(error)
                LOGGER.warning("%s", reported)
            lines = ()


def _matches(text: str, ranks: Sequence[range] | None, matches: Callable[[LogLine], bool]) -> bool:
    """Return whether a line of ``hvdtrain run`` is from ``ranks``, and ``matches`` accepts it.

    Lines of the launcher match only if ``ranks`` is None.
    """
    runs = [range(LAUNCHER, LAUNCHER + 1)]
    if tagged := _RANK_LINE.fullmatch(text):
        # If tags are turned off, the program's own text may look like a tag.
        with contextlib.suppress(ValueError):
            runs, text = parse_ranges(tagged["ranks"]), tagged["text"]
            if tagged["more"]:
                # The ranks that are left out are higher than the last one in the list.
                runs.append(range(runs[-1].stop, sys.maxsize))
    return matches(LogLine(time_s=0, rank=runs[0].start, stream="stdout", text=text)) and (
        ranks is None
        or any(max(one.start, run.start) < min(one.stop, run.stop) for one in ranks for run in runs)
    )


def _format(entry: LogEntry, with_time: bool) -> str:
    line = entry.line
    if line is None:
        return f"... {(entry.end - entry.begin) / 2**20:.1f} MiB of the log were removed ..."
    source = "hvdtrain run:" if line.rank == LAUNCHER else f"[{line.rank}]"
    return f"{_clock(line.time_s) if with_time else ''}{source} {line.text}"


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(time_s))


def _write(text: str) -> None:
    try:
        print(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding))


def _line_filter(
    ranks: Sequence[range] | None, text: str | None, pattern: str | None
) -> Callable[[LogLine], bool]:
    """Return a function that accepts lines of ``ranks`` that contain ``text`` and ``pattern``."""
    try:
        expression = re.compile(pattern or "")
    except re.error as error:
        raise ConfigurationError(
            f"--regex {pattern!r} is not a valid regular expression: {error}. Use --grep for plain "
            "text."
        ) from None
    return lambda line: (
        (ranks is None or any(line.rank in run for run in ranks))
        and (text or "") in line.text
        and expression.search(line.text) is not None
    )
