"""Exit codes of ``hvdtrain run`` and of programs, and the signals that end a job."""

from __future__ import annotations

import signal

__all__ = ["ENDING", "PREEMPTING", "ExitCode", "signal_name"]


class ExitCode:
    """Exit codes of ``hvdtrain run`` that neither a program nor a signal determines."""

    PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: a retry may succeed
    HANG = 124  # like timeout(1)
    CANNOT_START = 125  # like timeout(1), env(1), docker run


# Signals that end a job immediately.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals that announce that the job will end, so that it can save its state first.
PREEMPTING = (signal.SIGUSR1, signal.SIGUSR2)


def signal_name(code: int) -> str | None:
    """Return the signal that an exit code stands for: ``SIGKILL`` for 137; None otherwise."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return None
