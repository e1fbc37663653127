"""The meaning of lines of stderr, for programs that tell the launcher nothing, or no more."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["begins_crash", "begins_traceback", "exception_name", "excerpt", "is_information"]

_CRASH = "Fatal Python error:"
_BEGINNINGS = ("Traceback (most recent call last)", _CRASH)
# A crash lists all extension modules: thousands of characters that nobody needs at the end.
_MODULES = "Extension modules:"
# What faulthandler prints of a rank that the others did not meet in MPI's start, where Python can
# say nothing; see hvdtrain.collectives.mpi_start.
_TIMED_OUT, _STARTING = "Timeout (", " in start_mpi"
# What hvdtrain.collectives.exit_hooks adds to a traceback. It knows better: TensorFlow turns errors
# between ranks into some of its own.
_VERDICT = re.compile(
    r"(?:[\d: -]+ )?(?:\[\d+\] )?hvdtrain: rank \d+ of \d+ (?:stops|failed: (\w+)):"
)
# Of TensorFlow's information its variable can't hide what is said before that is read: Abseil's
# lines as long as nobody has set up its log: with a date of zeros, like "I0000
# 00:00:1795552261.046417   17820 port.cc:153] oneDNN custom operations are on."; and what it says
# before the first of them, whatever that is.
_EARLY_INFORMATION = re.compile(
    r"I0000 00:00:\d+\.\d+ +\d+ \S+:\d+\] "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
)
_MOST_LINES = 60
_FEW_LINES = 15


def begins_crash(line: str) -> bool:
    """Whether a line is the first that Python's faulthandler prints of a crash."""
    return line.startswith(_CRASH)


def begins_traceback(line: str) -> bool:
    """Whether a line is the first of a traceback or of a crash."""
    return line.startswith(_BEGINNINGS)


def exception_name(lines: Sequence[str]) -> str:
    """The class of the exception that ends the last traceback; empty where there is none."""
    within = timed_out = False
    found = ""
    for line in lines:
        timed_out = timed_out or line.startswith(_TIMED_OUT)
        if begins_traceback(line):
            within = True
        elif timed_out and line.endswith(_STARTING):
            found = "CollectiveTimeoutError"
        elif verdict := _VERDICT.match(line):
            found = verdict[1] or "PeerFailedError"
        elif within and (match := re.match(r"(?:\w+\.)*(\w+)(?::|$)", line)):
            found = match[1]
            within = False
    return found


def excerpt(lines: Sequence[str]) -> list[str]:
    """The lines from the first traceback on, or else the last ones."""
    starts = [index for index, line in enumerate(lines) if begins_traceback(line)]
    if not starts:
        return list(lines[-_FEW_LINES:])
    shown = [line for line in lines[starts[0] :] if not line.startswith(_MODULES)]
    if len(shown) <= _MOST_LINES:
        return shown
    half = _MOST_LINES // 2
    return [*shown[:half], f"... {len(shown) - 2 * half} lines ...", *shown[-half:]]


def is_information(line: str) -> bool:
    """Whether a line is information of TensorFlow's that ``TF_CPP_MIN_LOG_LEVEL`` can't hide."""
    return _EARLY_INFORMATION.match(line) is not None
