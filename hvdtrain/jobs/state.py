"""The state of a job, which its launcher writes, and the status that a reader derives from it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvdtrain.agent.process_tree import process_state, start_ticks

__all__ = [
    "GOES_ON",
    "GONE",
    "NO_ANSWER",
    "JobState",
    "Phase",
    "ProcessIdentity",
    "Status",
    "host_identity",
    "is_alive",
    "own_identity",
    "send_signal",
    "status_of",
]

Phase = Literal[
    "queued",  # waits for its turn
    "running",  # an attempt runs
    "restarting",  # between two attempts
    "ended",
]
Status = Literal[
    "queued",
    "running",
    "restarting",
    "done",
    "failed",
    "stopped",
    "preempted",
    "lost",  # its launcher is gone without a report
    "silent",  # its launcher, on another host, has not reported for long
    "unknown",  # its state can't be read, or its queue does not answer
]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
GONE = "GONE"
# It runs, and is restarted after a preemption.
GOES_ON = "GOES_ON"
NO_ANSWER = "NO_ANSWER"
_WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
# In some of them a job can't have written anything yet.
_RUNS = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", GOES_ON)
_OF_CAUSES: Mapping[str, Status] = {
    "done": "done",
    "ordered": "stopped",
    "preempted": "preempted",
    "lost": "lost",
}


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process, distinguished from others that had or get its number.

    Attributes:
        host: Its hostname.
        pid: Its process ID.
        started_ticks: When it started, in clock ticks since boot; 0 if unknown.
        boot_id: The host's boot ID; empty if unknown.
        pid_namespace: Its PID namespace, as of a container; 0 if unknown.
    """

    host: str
    pid: int
    started_ticks: int = 0
    boot_id: str = ""
    pid_namespace: int = 0


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job: its phase, its ranks, its progress and its end.

    Attributes:
        phase: What its launcher does.
        launcher: The process of ``hvdtrain run``; None before there is one.
        attempt: The number of this start of the ranks, from 1; 0 before the first.
        ranks: How many ranks there are in it.
        hosts: How many of them run on each host, in the order of their ranks.
        mpi: What starts them, as ``Open MPI 5.0.7``; empty for not known.
        since_s: When the phase began, in seconds since 1970.
        step: Optimizer steps that are complete; None for none.
        epoch: The epoch of the last step.
        total_steps: The step with which the training ends; None where it does not say so.
        saved: Step of the newest checkpoint.
        code: The exit code, once it has ended.
        cause: Why it ended, as ``hvdtrain.launch.failure`` names it.
        verdict: What was said of that.
    """

    phase: Phase
    launcher: ProcessIdentity | None = None
    attempt: int = 0
    ranks: int = 0
    hosts: Mapping[str, int] = field(default_factory=dict)
    mpi: str = ""
    since_s: float = 0.0
    step: int | None = None
    epoch: int | None = None
    total_steps: int | None = None
    saved: int | None = None
    code: int | None = None
    cause: str = ""
    verdict: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return asdict(self)


def status_of(
    state: JobState | None,
    *,
    alive: bool | None,
    quiet_s: float,
    patience_s: float,
    queue: str | None = None,
) -> Status:
    """Return the status of a job.

    Args:
        state: Its newest state; None if it can't be read.
        alive: Whether its launcher runs; None if only another host knows.
        quiet_s: Seconds since the launcher last touched the state, which it does all the time.
        patience_s: Seconds after which that counts.
        queue: Its state in Slurm or Kubernetes, as squeue names it; ``GOES_ON`` if it runs and
            is restarted when preempted, ``GONE`` if the queue has forgotten it, ``NO_ANSWER`` if
            the queue does not answer; None if it has no queue.
    """
    if state is None:
        return "unknown"
    if queue in _WAITS or (queue == GOES_ON and state.phase == "ended"):
        # Possibly one that was preempted, and is requeued or about to be.
        return "queued"
    if state.phase == "ended":
        return "done" if state.code == 0 else _OF_CAUSES.get(state.cause, "failed")
    if alive is False:
        return "lost"
    if alive is None and queue is not None and (state.launcher is None or quiet_s > patience_s):
        return _by_queue(queue, taken_up=state.launcher is not None)
    if alive is None and quiet_s > patience_s:
        # A launcher that has not started by then won't.
        return "silent" if state.launcher is not None else "lost"
    return state.phase


def _by_queue(word: str, *, taken_up: bool) -> Status:
    """Return the status of a job without news by its state in the queue."""
    if word in _RUNS:
        return "silent" if taken_up else "queued"
    if word == NO_ANSWER:
        return "silent" if taken_up else "unknown"
    return "stopped" if word == "CANCELLED" else "lost"


def host_identity() -> str:
    """Return a unique name of this host: other machines may have the same hostname."""
    return f"{socket.gethostname().lower()}-{_boot_id()}"


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return ProcessIdentity(
        host=socket.gethostname(),
        pid=pid,
        started_ticks=start_ticks(pid),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
    )


def is_alive(process: ProcessIdentity) -> bool | None:
    """Return whether a process runs; None if that can't be seen from here.

    It can't on other hosts, after a reboot (as which another machine or container with the same
    hostname appears), and in other PID namespaces.
    """
    if (process.host, process.boot_id) != (socket.gethostname(), _boot_id()):
        return None
    if process.pid_namespace not in (0, _pid_namespace()):
        return None
    # A process that has ended keeps its number until its parent reaps it.
    there = process_state(process.pid) not in ("", "Z", "X")
    return there and start_ticks(process.pid) == process.started_ticks


def send_signal(process: ProcessIdentity, number: int) -> bool:
    """Send a signal to a process, not to another one with its number; return whether it runs.

    Raises:
        PermissionError: It belongs to another user.
    """
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            # From here on the handle can't mean another process.
            if is_alive(process):
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> int:
    try:
        return _PID_NAMESPACE.stat().st_ino
    except OSError:
        return 0
