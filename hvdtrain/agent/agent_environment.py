"""Environment variables in which the launcher tells agents what they need; theirs alone."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.config import LAUNCHER
from hvdtrain.errors import LaunchError

__all__ = ["ATTEMPT", "BIND", "JOB", "OUTPUT_DIR", "format_addresses", "parse_addresses"]

# A random word that only this job knows.
JOB = "HVDTRAIN_JOB"
# 0 leaves the ranks to the scheduler, on all cores.
BIND = "HVDTRAIN_BIND"
OUTPUT_DIR = "HVDTRAIN_OUTPUT_DIR"
# The number of this start of the job by one hvdtrain run, from 1.
ATTEMPT = "HVDTRAIN_ATTEMPT"


def format_addresses(hosts: Sequence[str], port: int) -> str:
    """Return the value of ``config.LAUNCHER``."""
    return " ".join([*hosts, str(port)])


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Read what ``format_addresses`` wrote: pairs of host and port.

    Raises:
        LaunchError: It is something else.
    """
    *hosts, port = text.split() or [""]
    if not hosts or not port.isdecimal():
        raise LaunchError(f"{LAUNCHER}={text!r} names no launcher; start ranks with hvdtrain run.")
    return [(host, int(port)) for host in hosts]
