"""Two processes that watch each other, so that killing either leaves nothing behind.

mpirun ends its ranks by SIGKILL when it is in a hurry, and the process that it knows then can't
tidy up any more. So that one only stands guard, and a child of it in a session of its own, out of
mpirun's reach, does the work. Each adopts what the other leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType

from hvdtrain.agent.exit_codes import ENDING, PREEMPTING
from hvdtrain.agent.process_tree import kill_descendants, shell_code

__all__ = ["adopt_orphans", "die_with_parent", "run_guarded"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def run_guarded(work: Callable[[int], int]) -> int:
    """Run ``work`` in a child process; returns what it returned, or 128 + the signal it died of.

    Signals that this process gets are passed on to the child. When the child ends, whatever
    descends from it is killed. ``work`` gets a file that is at its end once this process has died.
    """
    adopt_orphans()
    lifeline, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _lead_group()
        os._exit(work(lifeline))
    os.close(lifeline)

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (*ENDING, *PREEMPTING):
        signal.signal(number, pass_on)
    _, status = os.waitpid(child, 0)
    kill_descendants(os.getpid())
    return shell_code(os.waitstatus_to_exitcode(status))


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that they can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _lead_group() -> None:
    """Let no signal to the caller's process group come to this process; in a child.

    It stays in its session. Linux gives each session the same share of the cores (sched(7),
    autogroup) and balances worse between sessions than within one: ranks in sessions of their own
    made a fifth fewer updates a second where there were more of them than cores.
    """
    os.setpgid(0, 0)


def die_with_parent() -> None:
    """Lead a process group, and die when the parent does; for a child before its exec."""
    _lead_group()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Linux's ``prctl``; elsewhere a rank does without."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
