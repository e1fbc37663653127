"""Exit codes of ``hvdtrain run`` and of programs, and the signals that end a job."""

from __future__ import annotations

import signal

__all__ = ["ENDING", "PREEMPTING", "ExitCode", "signal_name"]


class ExitCode:
    """Codes of ``hvdtrain run`` beside those of the program and 128 + signal."""

    PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same job again may well succeed
    HANG = 124  # as timeout(1)
    CANNOT_START = 125  # as timeout(1), env(1), docker run


# What ends a job at once.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What says that the time of a job is nearly over, as long as it can still save what it has.
PREEMPTING = (signal.SIGUSR1, signal.SIGUSR2)


def signal_name(code: int) -> str | None:
    """The signal that a shell's exit code tells of; None where the program ended by itself."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return None
