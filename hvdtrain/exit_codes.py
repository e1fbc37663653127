"""Exit codes of ``hvdtrain run`` and of programs, and the signals that end a job."""

from __future__ import annotations

import signal

__all__ = ["ENDING", "PREEMPTING", "ExitCode", "signal_name"]


class ExitCode:
    """Codes of ``hvdtrain run`` in addition to the program's and 128 + signal."""

    PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same job again may well succeed
    HANG = 124  # as timeout(1)
    CANNOT_START = 125  # as timeout(1), env(1), docker run


# Signals that end a job at once.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals that the job's time is nearly over: it can still save its state.
PREEMPTING = (signal.SIGUSR1, signal.SIGUSR2)


def signal_name(code: int) -> str | None:
    """Return the name of the signal behind a shell's exit code, or None."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return None
