"""Tells ``hvdtrain run`` how far this rank is: its step, its phase, its checkpoints, its failure.

The launcher says with it what a failed job has lost, and notices one that hangs. Under any other
launcher all of it does nothing. Nothing here waits, and no error of it reaches the program.

What is written: one JSON object a line into the file that ``config.REPORT_FD`` names, each with all
there is to say; ``hvdtrain.agent.rank_report`` is the other side. The first call installs
Python's own printer of stacks for SIGQUIT, by which the launcher asks a rank where it is.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import math
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from hvdtrain.config import MAX_TEXT_LENGTH, REPORT_FD

__all__ = [
    "during",
    "is_heard",
    "learned",
    "phase",
    "planned",
    "resumed",
    "saved",
    "step",
    "waited_for_input",
    "watch",
]

INTERVAL_S = 1.0
# What a pipe takes as a whole or not at all (PIPE_BUF).
MOST_BYTES = 4096
_STDERR = 2


def step(step: int, epoch: int) -> None:
    """``step`` optimizer steps of the whole training are complete, the last one in ``epoch``."""
    _note(step=step, epoch=epoch)


def is_heard() -> bool:
    """Whether somebody listens; what is costly to find out need not be found out otherwise."""
    return _note().is_heard


def learned(samples: float, loss: float) -> None:
    """All ranks have trained on so many samples in this run of the program, the last with ``loss``.

    The chief tells it for all.
    """
    _note(samples=samples, loss=loss)


def planned(total_steps: int | None) -> None:
    """Training is to end after ``total_steps`` optimizer steps in all; None for unknown."""
    _note(total_steps=total_steps)


def waited_for_input(more_s: float) -> None:
    """This rank's training has waited so many seconds more for its next batches."""
    _note(input_s=(_note().input_s or 0.0) + more_s)


def phase(name: str) -> None:
    """Report what the program does from now on.

    Steps are expected in ``"training"`` alone: no other phase (``"compiling"``, ``"validation"``,
    ``"checkpoint"``, ...) counts as a hang, however long it takes. Say so before something long.
    """
    if _note().phase != name:
        _note(phase=name).tell()


@contextlib.contextmanager
def during(name: str) -> Iterator[None]:
    """Within the block the program is in the phase ``name``; afterwards in the one before."""
    before = _note().phase
    phase(name)
    try:
        yield
    finally:
        phase(before)


def saved(step: int) -> None:
    """The checkpoint of ``step`` is complete and durable."""
    _note(saved=step).tell()


def resumed(step: int) -> None:
    """Training goes on from the checkpoint of ``step``."""
    _note(resumed=step).tell()


def watch(
    waiting_in: Callable[[], str],
    waited_s: Callable[[], float] | None = None,
    reduced_bytes: Callable[[], int] | None = None,
) -> None:
    """Ask about once a second what this rank waits for, and what it exchanges.

    Args:
        waiting_in: Which operation it waits in, ``""`` for none.
        waited_s: How long it has waited for other ranks in all, in seconds; None for unknown.
        reduced_bytes: How much it has put into allreduce in all; None for unknown.

    They are called on a thread of its own. A later call replaces them.
    """
    _note(waiting_in=waiting_in, waited_s=waited_s, reduced_bytes=reduced_bytes)


# Not public: hvdtrain's own hook calls it, which knows the error between ranks behind another one.
def failed(cause: BaseException, error: BaseException) -> None:
    """This rank's program ends by ``cause``, of which Python prints ``error``, or the same."""
    _note().tell_failure(cause, error)


class _Reporter:
    """The newest state, and the file that it goes to; None for nowhere."""

    def __init__(self, file: int | None) -> None:
        self.step: int | None = None
        self.epoch: int | None = None
        self.phase = ""
        self.total_steps: int | None = None
        self.saved: int | None = None
        self.resumed: int | None = None
        self.samples: float | None = None
        self.loss: float | None = None
        self.input_s: float | None = None
        self.waiting_in: Callable[[], str] = lambda: ""
        self.waited_s: Callable[[], float] | None = None
        self.reduced_bytes: Callable[[], int] | None = None
        self._file = file
        self._pid: int | None = None
        self._told = b""
        self._has_failed = False
        # A signal handler may report while the thread that it interrupts does.
        self._lock = threading.RLock()

    @property
    def is_heard(self) -> bool:
        """Whether there is a file that it goes to."""
        return self._file is not None

    def start(self) -> None:
        """Let the launcher look into this process, and write what changes."""
        with contextlib.suppress(Exception):
            # A program that has its own use for the signal is not asked. What was started in the
            # background by a script ignores it, without having chosen that.
            if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
                faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True)
                self._pid = os.getpid()
        sys.excepthook = functools.partial(self._on_exception, sys.excepthook)
        os.register_at_fork(after_in_child=self._fall_silent)
        atexit.register(self.tell)
        threading.Thread(target=self._tell_often, name="hvdtrain-report", daemon=True).start()

    def tell(self) -> None:
        """Write the state if it has changed; never waits, never raises."""
        if self._file is None:
            return
        with contextlib.suppress(Exception), self._lock:
            state: dict[str, Any] = {"kind": "report", "pid": self._pid}
            for name in ("step", "epoch", "total_steps", "saved", "resumed"):
                value = getattr(self, name)
                if value is not None:
                    state[name] = int(value)
            if self.samples is not None and math.isfinite(self.samples):
                state["samples"] = round(self.samples)
            if self.loss is not None and math.isfinite(self.loss):
                state["loss"] = float(f"{self.loss:.6g}")
            if (waited_s := self._asked(self.waited_s)) is not None:
                state["waited_s"] = round(waited_s, 3)
            if self.input_s is not None and math.isfinite(self.input_s):
                state["input_s"] = round(self.input_s, 3)
            if (reduced_bytes := self._asked(self.reduced_bytes)) is not None:
                state["reduced_bytes"] = round(reduced_bytes)
            state["phase"] = str(self.phase)[:MAX_TEXT_LENGTH]
            state["waiting_in"] = self._waits()[:MAX_TEXT_LENGTH]
            line = _line(state)
            # Where whoever reads is slow, the next state will do.
            if line != self._told and self._send(line):
                self._told = line

    def tell_failure(self, cause: BaseException, error: BaseException) -> None:
        """Write why the program ends, the first time; never waits, never raises."""
        if self._file is None or self._has_failed:
            return
        self._has_failed = True
        with contextlib.suppress(Exception), self._lock:
            record = {
                "kind": "failure",
                "exception": type(cause).__name__,
                "message": str(cause)[:MAX_TEXT_LENGTH],
                "traceback": "",
                "time_s": time.time(),
            }
            printed = traceback.format_exception(type(error), error, error.__traceback__)
            lines = [line[:MAX_TEXT_LENGTH] for line in "".join(printed).splitlines()]
            while lines and len(_line(record | {"traceback": "\n".join(lines)})) > MOST_BYTES:
                del lines[len(lines) // 2]
            self._send(_line(record | {"traceback": "\n".join(lines)}))

    def _on_exception(
        self,
        previous: Callable[..., object],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self.tell_failure(error, error)
        previous(kind, error, trace)

    def _send(self, line: bytes) -> bool:
        """Write a line as a whole or not at all; return whether that was possible."""
        if self._file is None or len(line) > MOST_BYTES:
            return False
        try:
            os.write(self._file, line)
        except BlockingIOError:
            return False
        except OSError:
            self._file = None
            return False
        return True

    def _waits(self) -> str:
        try:
            return str(self.waiting_in())
        except Exception:
            return ""

    @staticmethod
    def _asked(ask: Callable[[], float] | None) -> float | None:
        """Ask a function of the program's for a number; None where it gives none."""
        try:
            number = None if ask is None else float(ask())
        except Exception:
            return None
        return number if number is not None and math.isfinite(number) else None

    def _tell_often(self) -> None:
        pause = threading.Event()
        while self._file is not None:
            pause.wait(INTERVAL_S)
            self.tell()

    def _fall_silent(self) -> None:
        """Report nothing in a forked child: its parent is the rank; who held the lock is gone."""
        self._file = None


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


_reporter: _Reporter | None = None
_beginning = threading.RLock()


def _note(**news: Any) -> _Reporter:
    """Return this process's reporter, with some attributes changed."""
    reporter = _reporter or _begin()
    vars(reporter).update(news)
    return reporter


def _begin() -> _Reporter:
    global _reporter
    with _beginning:
        if _reporter is None:
            reporter = _Reporter(_open_file())
            if reporter._file is not None:
                reporter.start()
            _reporter = reporter
    return _reporter


def _open_file() -> int | None:
    """The launcher's pipe, which from now on is this process's alone; None where there is none."""
    try:
        number, inode = map(int, os.environ.get(REPORT_FD, "").split(":"))
        found = os.fstat(number)
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:
            return None
        os.set_inheritable(number, False)
        os.set_blocking(number, False)
    except (OSError, ValueError):
        return None
    return number
