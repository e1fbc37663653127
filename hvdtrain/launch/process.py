"""One process tree: start it, pass signals on, stop it, and say how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from hvdtrain.errors import LaunchError
from hvdtrain.launch.commands import Command

__all__ = ["run_to_end"]

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REAP_TIMEOUT_S = 5.0
_POLL_S = 0.1


def run_to_end(command: Command, *, grace_s: float) -> int:
    """Run ``command`` in a session of its own until all of it has ended; return the exit code.

    Its output is this process's output; its input is empty, so that a job never waits for a
    terminal. SIGINT, SIGTERM and SIGHUP that this process receives are passed on; what is left
    ``grace_s`` seconds later, or at a second SIGINT, is killed. Call it from the main thread.

    Returns:
        The command's own exit code; 128 + n where signal n ended it or this process got it.

    Raises:
        LaunchError: The program can't be started.
    """
    with _caught_signals() as received:
        try:
            child = subprocess.Popen(
                command.argv,
                env=command.environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"{command.argv[0]} can't be started: {error.strerror}. Install the MPI again, "
                "or load another one."
            ) from None
        code = _wait(child, received, grace_s)
    return 128 + received[0] if received else _exit_code(code)


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect the signals that arrive instead of dying of them; undone at the end."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    # What was ignored when this process started (nohup) stays ignored.
    caught = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen[bytes], received: list[int], grace_s: float) -> int:
    passed_on = 0
    deadline = None
    while True:
        try:
            code = child.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            if code != 0:
                _kill(_members(child.pid))
            return code
        if len(received) > passed_on:
            deadline = deadline or time.monotonic() + grace_s
            _signal_group(child.pid, received[passed_on])
            passed_on += 1
        impatient = received.count(signal.SIGINT) > 1
        if deadline is not None and (impatient or time.monotonic() > deadline):
            return _end(child)


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kill what is left: mpirun gives ranks process groups, some even sessions, of their own."""
    members = _members(child.pid)
    _signal_group(child.pid, signal.SIGKILL)
    _kill(members)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_REAP_TIMEOUT_S)
    return -signal.SIGKILL


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _members(leader: int) -> list[int]:
    """Processes of the session that ``leader`` leads or led, and all their descendants."""
    found: list[int] = []
    tree = _process_table()
    while True:
        known = {leader, *found}
        more = [
            pid
            for pid, (parent, session) in tree.items()
            if pid not in known and (session == leader or parent in known)
        ]
        if not more:
            return found
        found.extend(more)


def _process_table() -> dict[int, tuple[int, int]]:
    """Parent and session of every process (Linux; elsewhere empty)."""
    table: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field, the program's name in parentheses, may hold anything.
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            table[int(entry.parent.name)] = (int(fields[1]), int(fields[3]))
    return table


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
