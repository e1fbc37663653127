"""The state of a job, which its launcher writes, and the status, which readers derive from it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from hvdtrain.agent.process_tree import process_state, start_ticks

__all__ = [
    "GONE",
    "NO_ANSWER",
    "RESTARTABLE",
    "JobState",
    "Phase",
    "ProcessIdentity",
    "QueueState",
    "Status",
    "derive_status",
    "host_identity",
    "is_alive",
    "own_identity",
    "send_signal",
]

Phase = Literal[
    "queued",
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
    "lost",  # the launcher ended without a report
    "silent",  # the launcher, on another host, has not reported for a minute
    "unknown",  # the state can't be read, or the queue does not answer
]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
# States of a job in its queue, in addition to Slurm's states.
GONE = "GONE"  # the queue does not know the job any more
RESTARTABLE = "RESTARTABLE"  # the job runs, and the queue restarts it after a preemption
NO_ANSWER = "NO_ANSWER"  # the queue does not answer
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
# In some of these states, a job may not have written anything yet.
_RUNNING = (
    *("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"),
    RESTARTABLE,
)
_STATUS_BY_CAUSE: Mapping[str, Status] = {
    "done": "done",
    "ordered": "stopped",
    "preempted": "preempted",
    "lost": "lost",
}


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process, identified even if another process later gets the same process ID."""

    host: str
    pid: int
    started_ticks: int = 0  # when the process started, in clock ticks since boot; 0 if unknown
    boot_id: str = ""  # the host's boot ID; empty if unknown
    pid_namespace: int = 0  # the inode of the PID namespace; 0 if unknown


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job: its phase, ranks, progress and result."""

    phase: Phase  # the launcher's phase
    # the process of ``hvdtrain run``; None before it starts
    launcher: ProcessIdentity | None = None
    attempt: int = 0  # how many times the ranks have been started
    ranks: int = 0  # the number of ranks in this attempt
    # the number of ranks on each host, in rank order
    hosts: Mapping[str, int] = field(default_factory=dict)
    mpi: str = ""  # the MPI that starts the ranks, such as ``Open MPI 5.0.7``; empty if unknown
    since_s: float = 0.0  # when the phase began, in seconds since 1970
    step: int | None = None  # completed optimizer steps; None before the first
    epoch: int | None = None  # the epoch of the last step, from 0
    total_steps: int | None = None  # the step after which training ends; None if unknown
    saved: int | None = None  # the step of the newest checkpoint
    code: int | None = None  # the exit code; None until the job has ended
    cause: str = ""  # why it ended, as ``hvdtrain.launch.failure`` classifies it
    verdict: str = ""  # why it ended, as a message for users


class QueueState(NamedTuple):
    """The state of a job in its queue."""

    queue: str  # the name of the queue, for messages
    state: str  # the state, as ``derive_status`` expects it
    reason: str  # the queue's reason for this state; may be empty
    # the full state, if the job can't write it to its folder
    job_state: JobState | None = None


def derive_status(
    state: JobState | None,
    *,
    alive: bool | None,
    quiet_s: float,
    patience_s: float,
    queue_state: str | None = None,
) -> Status:
    """Return the status of a job.

    Args:
        state: The newest state; None if it can't be read.
        alive: Whether the launcher runs; None if that is only visible on another host.
        quiet_s: Seconds since the last heartbeat of the launcher.
        patience_s: Seconds without a heartbeat after which the launcher is considered silent.
        queue_state: The state in Slurm or Kubernetes: a state of squeue, ``RESTARTABLE``, ``GONE``
            or ``NO_ANSWER``; None if the queue was not asked.
    """
    if state is None:
        return "unknown"
    if queue_state in _WAITING or (queue_state == RESTARTABLE and state.phase == "ended"):
        # The job may have been preempted. Then it has been requeued, or will be soon.
        return "queued"
    if state.phase == "ended":
        return "done" if state.code == 0 else _STATUS_BY_CAUSE.get(state.cause, "failed")
    if alive is False:
        return "lost"
    is_silent = quiet_s > patience_s
    if alive is None and queue_state is not None and (state.launcher is None or is_silent):
        return _status_in_queue(queue_state, has_started=state.launcher is not None)
    if alive is None and is_silent:
        # A launcher that has not started by now never will.
        return "silent" if state.launcher is not None else "lost"
    return state.phase


def _status_in_queue(queue_state: str, *, has_started: bool) -> Status:
    """Derive the status of a job without heartbeats from its state in the queue."""
    if queue_state in _RUNNING:
        return "silent" if has_started else "queued"
    if queue_state == NO_ANSWER:
        return "silent" if has_started else "unknown"
    return "stopped" if queue_state == "CANCELLED" else "lost"


def host_identity() -> str:
    """Return a unique name of this host. The hostname alone would not be unique."""
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
    """Return whether a process runs; None if this process can't see that.

    This process can't see processes on other hosts or in other PID namespaces. A different boot ID
    means that this host has been rebooted, or that another machine has the same hostname.
    """
    if (process.host, process.boot_id) != (socket.gethostname(), _boot_id()):
        return None
    if process.pid_namespace not in (0, _pid_namespace()):
        return None
    # A process that has ended keeps its ID until its parent reaps it.
    exists = process_state(process.pid) not in ("", "Z", "X")
    return exists and start_ticks(process.pid) == process.started_ticks


def send_signal(process: ProcessIdentity, number: int) -> bool:
    """Send a signal to a process and return whether the process still runs.

    A different process that has got the same process ID never receives the signal.

    Raises:
        PermissionError: If the process belongs to another user.
    """
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            # The handle can't refer to another process from here on.
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
