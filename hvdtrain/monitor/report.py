"""Reports the progress of this rank to ``hvdtrain run``: steps, phases, checkpoints and failures.

The launcher uses the reports to compute how much work a failed job has lost, and to detect hangs.
If ``hvdtrain run`` did not start this rank, these functions do nothing. They never block or raise.

Each report is a line of JSON that contains the whole state. It is written to the file descriptor in
``config.REPORT_FD`` and read by ``hvdtrain.agent.rank_report``. The first call also registers
``faulthandler`` for SIGQUIT, because the launcher sends SIGQUIT to get the stacks of a rank.
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
    "saves_on_signal",
    "step",
    "waited_for_input",
    "watch",
    "writing",
]

INTERVAL_S = 1.0
# States that are reported while they are true.
_FLAGS = ("writing", "saves_on_signal")
# Writes up to PIPE_BUF bytes to a pipe are atomic.
MOST_BYTES = 4096
_STDERR = 2
# The reported numbers and how they are rounded.
_NUMBERS: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(("step", "epoch", "total_steps", "saved", "resumed"), int),
    **dict.fromkeys(("samples", "reduced_bytes"), round),
    **dict.fromkeys(("waited_s", "input_s"), lambda seconds: round(seconds, 3)),
    "loss": lambda loss: float(f"{loss:.6g}"),
}


def step(step: int, epoch: int) -> None:
    """Report that ``step`` optimizer steps are complete in total. The last one was in ``epoch``."""
    _update(step=step, epoch=epoch)


def is_heard() -> bool:
    """Return whether a launcher receives the reports. If not, callers skip costly measurements."""
    return _update().is_open


def learned(samples: float, loss: float) -> None:
    """Report how many samples all ranks have trained on in this run, and the newest ``loss``.

    Only the chief calls this.
    """
    _update(samples=samples, loss=loss)


def planned(total_steps: int | None) -> None:
    """Report the total number of optimizer steps of the training, or None if that is unknown."""
    _update(total_steps=total_steps)


def waited_for_input(more_s: float) -> None:
    """Report that this rank has waited ``more_s`` more seconds for its next batches."""
    _update(input_s=_update().values.get("input_s", 0.0) + more_s)


def phase(name: str) -> None:
    """Report the current phase of the program. Call this before a long operation.

    Steps are expected only in ``"training"``. Other phases (``"compiling"``, ``"validation"``,
    ``"checkpoint"``, ...) may take any time; the launcher never considers them a hang.
    """
    if _update().phase != name:
        _update(phase=name).send()


@contextlib.contextmanager
def during(name: str) -> Iterator[None]:
    """Report the phase ``name`` within the block, and the previous one after it."""
    previous = _update().phase
    phase(name)
    try:
        yield
    finally:
        phase(previous)


def saved(step: int) -> None:
    """Report that the checkpoint of ``step`` is complete and durable."""
    _update(saved=step).send()


def writing(is_writing: bool) -> None:
    """Report whether a checkpoint is being written, which the launcher lets a rank finish."""
    _update(writing=is_writing).send()


def saves_on_signal(saves: bool) -> None:
    """Report whether SIGTERM does nothing but make all ranks save a checkpoint together.

    The launcher kills such a rank at once if another rank has failed, because the ranks can't save
    a checkpoint without that rank.
    """
    _update(saves_on_signal=saves).send()


def resumed(step: int) -> None:
    """Report that training resumes from the checkpoint of ``step``."""
    _update(resumed=step).send()


def watch(
    waiting_in: Callable[[], str],
    waited_s: Callable[[], float] | None = None,
    reduced_bytes: Callable[[], int] | None = None,
) -> None:
    """Set functions whose results are reported about once a second.

    The functions are called on a separate thread. A later call of ``watch`` replaces all functions.

    Args:
        waiting_in: A function that returns the operation in which this rank waits, or "" if the
            rank doesn't wait.
        waited_s: A function that returns how many seconds this rank has waited for other ranks.
        reduced_bytes: A function that returns how many bytes this rank has passed to allreduce.
    """
    _update(waiting_in=waiting_in, waited_s=waited_s, reduced_bytes=reduced_bytes)


# Not public: hvdtrain.init() calls this.
def bound(gpu_id: str) -> None:
    """Report the ID of this rank's first GPU."""
    _update(gpu_id=gpu_id).send()


# Not public: only hvdtrain's excepthook calls this. The hook knows why a collective has failed.
def failed(cause: BaseException, error: BaseException) -> None:
    """Report that the program ends because of ``cause``, with the traceback of ``error``."""
    _update().send_failure(cause, error)


class _Reporter:
    """The newest state, and the launcher's file descriptor, or None without a launcher."""

    def __init__(self, file: int | None) -> None:
        self.values: dict[str, Any] = {}
        self._file = file
        self._pid: int | None = None
        self._sent = b""
        self._has_failed = False
        # Reentrant because a signal handler may interrupt a report and send one itself.
        self._lock = threading.RLock()
        if file is not None:
            self._start()

    @property
    def phase(self) -> str:
        """The current phase of the program."""
        return str(self.values.get("phase", ""))

    @property
    def is_open(self) -> bool:
        """Whether a launcher receives the reports."""
        return self._file is not None

    def _start(self) -> None:
        """Register the handlers, and start the thread that reports changes."""
        with contextlib.suppress(Exception):
            # The program's own handler is kept. SIG_IGN is replaced, because programs that a shell
            # script starts in the background inherit it.
            if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
                faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True)
                self._pid = os.getpid()
        sys.excepthook = functools.partial(self._on_exception, sys.excepthook)
        os.register_at_fork(after_in_child=self._close)
        atexit.register(self.send)
        threading.Thread(target=self._run, name="hvdtrain-report", daemon=True).start()

    def send(self) -> None:
        """Write the state if it has changed. This never blocks or raises."""
        if self._file is None:
            return
        with contextlib.suppress(Exception), self._lock:
            state: dict[str, Any] = {"kind": "report", "pid": self._pid}
            for name, convert in _NUMBERS.items():
                if (number := _finite(self.values.get(name))) is not None:
                    state[name] = convert(number)
            state |= {name: True for name in _FLAGS if self.values.get(name)}
            if gpu_id := self.values.get("gpu_id"):
                state["gpu_id"] = gpu_id
            state["phase"] = self.phase[:MAX_TEXT_LENGTH]
            state["waiting_in"] = ""
            if (waiting_in := self.values.get("waiting_in")) is not None:
                with contextlib.suppress(Exception):
                    state["waiting_in"] = str(waiting_in())[:MAX_TEXT_LENGTH]
            line = _line(state)
            # If the pipe is full, the next state replaces this one.
            if line != self._sent and self._write(line):
                self._sent = line

    def send_failure(self, cause: BaseException, error: BaseException) -> None:
        """Write why the program ends, unless it was written before. This never blocks or raises."""
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
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            lines = [line[:MAX_TEXT_LENGTH] for line in text.splitlines()]
            while lines and len(_line(record | {"traceback": "\n".join(lines)})) > MOST_BYTES:
                del lines[len(lines) // 2]
            self._write(_line(record | {"traceback": "\n".join(lines)}))

    def _on_exception(
        self,
        previous: Callable[..., object],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self.send_failure(error, error)
        previous(kind, error, trace)

    def _write(self, line: bytes) -> bool:
        """Write a whole line or nothing; return whether the line was written."""
        if self._file is None or len(line) > MOST_BYTES:
            return False
        try:
            os.write(self._file, line)
        except BlockingIOError:
            return False
        except OSError:
            self._close()
            return False
        return True

    def _run(self) -> None:
        pause = threading.Event()
        while self._file is not None:
            pause.wait(INTERVAL_S)
            self.send()

    def _close(self) -> None:
        """Stop reporting. Forked children call this, because only their parent is the rank."""
        self._file = None


def _finite(value: float | Callable[[], float] | None) -> float | None:
    """Return a number, or a function's result; None if it is unknown or not finite, or fails."""
    try:
        # Functions of programs may return NumPy numbers, which are not JSON.
        number = float(value()) if callable(value) else value
        return None if number is None or not math.isfinite(number) else number
    except Exception:
        return None


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


_reporter: _Reporter | None = None
_start_lock = threading.RLock()


def _update(**values: Any) -> _Reporter:
    """Update the state of this process's reporter, and return the reporter."""
    global _reporter
    reporter = _reporter
    if reporter is None:
        with _start_lock:
            reporter = _reporter = _reporter or _Reporter(_open_pipe())
    reporter.values.update(values)
    return reporter


def _open_pipe() -> int | None:
    """Return the launcher's pipe, which children don't inherit; None without a launcher."""
    try:
        number, inode = map(int, os.environ.get(REPORT_FD, "").split(":"))
        status = os.fstat(number)
        if not stat.S_ISFIFO(status.st_mode) or status.st_ino != inode:
            return None
        os.set_inheritable(number, False)
        os.set_blocking(number, False)
    except (OSError, ValueError):
        return None
    return number
