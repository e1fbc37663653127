"""Exit hooks that wait for the other ranks, or notify them if this rank fails."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from hvdtrain.collectives.engine import Engine, error_location
from hvdtrain.collectives.mpi import MpiTransport
from hvdtrain.errors import PeerFailedError

__all__ = ["ExitCodeWatch", "ReportFailure", "install"]

logger = logging.getLogger(__package__)

# A rank that stops because another rank failed waits this long. The failed rank should exit first,
# so that the launcher sees its exit code.
FOLLOWER_PAUSE_S = 2.0
# A failed process is ended after this time, because threads of libraries may keep it alive.
EXIT_DEADLINE_S = 5.0

_current: Engine | None = None

# Called with the cause and the error that Python prints. The error may wrap the cause.
ReportFailure = Callable[[BaseException, BaseException], None]


def install(engine: Engine, report_failure: ReportFailure = lambda cause, error: None) -> None:
    """Install hooks that notify the other ranks when this process fails or exits.

    Call this again if the program calls ``init()`` after ``shutdown()``: the new engine replaces
    the old one.

    ``report_failure`` reports a failure to the launcher.
    """
    global _current
    if not isinstance(engine.transport, MpiTransport):
        return
    if _current is None:
        sys.excepthook = functools.partial(_on_exception, sys.excepthook, report_failure)
        atexit.register(_leave, ExitCodeWatch())
        os.register_at_fork(after_in_child=_forget)
    elif _current.closed and isinstance(_current.transport, MpiTransport):
        _current.transport.free_detector()
    _current = engine


def _forget() -> None:
    """Disable the hooks in a forked child, which is not a rank."""
    global _current
    _current = None


def _on_exception(
    previous: Callable[..., object],
    report_failure: ReportFailure,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    engine = _current
    # TensorFlow wraps errors in its own exceptions.
    last = engine.last_error if engine is not None else None
    cause = last if last is not None and str(last) in str(error) else error
    report_failure(cause, error)
    previous(kind, error, trace)
    if engine is None or engine.closed:
        return
    # The launcher uses initial ranks.
    name = f"rank {engine.member} of {len(engine.numbers)}"
    follows = isinstance(cause, PeerFailedError)
    text = f"stops: {cause}" if follows else f"failed: {type(cause).__name__}: {cause}"
    logger.error("%s %s", name, text)
    engine.fail(f"{type(cause).__name__}: {cause}{error_location(trace)}")
    if follows:
        time.sleep(FOLLOWER_PAUSE_S)
    _end_within(EXIT_DEADLINE_S)


def _end_within(seconds: float) -> None:
    def end() -> None:
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _leave(watch: ExitCodeWatch) -> None:
    watch.close()
    sys.stdout.flush()
    if _current is None:
        return
    if not watch.code:
        with suppress(Exception):  # JAX prints the errors of its functions
            _current.before_operation()
    _current.transport.leave(watch.code)


class ExitCodeWatch:
    """Records the code passed to ``sys.exit``, which Python does not pass to exit functions.

    If a rank exits with an error code while other ranks are busy, it must end the job instead of
    waiting for the other ranks.

    The code is recorded only if nothing catches the ``SystemExit``, because only then does the
    program end. In this case the interpreter reads the exception's ``code``. This read is
    recognized because no Python code calls the property, unlike in a program that catches the
    exception and inspects its code. Programs that raise ``SystemExit`` themselves are not detected.
    """

    def __init__(self) -> None:
        self.code = 0  # the exit code, or 0 until the interpreter has read it
        self._original = sys.exit
        sys.exit = self._exit

    def close(self) -> None:
        """Restore ``sys.exit``."""
        sys.exit = self._original

    def _exit(self, status: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status), like Python's ``sys.exit``."""
        raise _Exit(self, status)

    def record(self, code: object) -> None:
        """Record the exit code that the interpreter uses: 0 for None, 1 for other non-integers."""
        self.code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1


class _Exit(SystemExit):
    """A ``SystemExit`` that notifies the watch when the interpreter reads its code."""

    def __init__(self, watch: ExitCodeWatch, *status: object) -> None:
        super().__init__(*status)
        self._watch = watch
        self._code = status[0]

    @property
    def code(self) -> Any:
        try:
            sys._getframe(1)
        except ValueError:  # no Python code calls this property
            self._watch.record(self._code)
        return self._code

    @code.setter
    def code(self, value: Any) -> None:
        self._code = value

    def __reduce__(self) -> tuple[type[SystemExit], tuple[object]]:
        return SystemExit, (self._code,)


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__
_Exit.__module__ = SystemExit.__module__
