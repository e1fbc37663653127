"""Hooks for a rank's end: it waits for the others, or tells them at once if it fails."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from hvdtrain.collectives.engine import Engine, error_location
from hvdtrain.collectives.mpi import MpiTransport
from hvdtrain.errors import PeerFailedError

__all__ = ["ExitCodeWatch", "Tell", "install"]

logger = logging.getLogger(__package__)

# A rank that only follows another's failure lets that one end first, so that its exit code counts.
FOLLOWER_PAUSE_S = 2.0
# Threads of libraries have kept failed processes from ending.
EXIT_DEADLINE_S = 5.0


_current: Engine | None = None


# Gets the error that ends this process, and that which Python prints: the same, or what a library
# has made of it.
Tell = Callable[[BaseException, BaseException], None]


def install(engine: Engine, tell: Tell = lambda cause, error: None) -> None:
    """Tell the other ranks when this process fails or leaves, from now on.

    A second call, after ``shutdown()`` and another ``init()``, puts the new engine in place of the
    old one.

    Args:
        engine: Reaches the other ranks.
        tell: Tells the launcher.
    """
    global _current
    if not isinstance(engine.transport, MpiTransport):
        return
    if _current is None:
        sys.excepthook = functools.partial(_on_exception, sys.excepthook, tell)
        atexit.register(_leave, ExitCodeWatch())
        os.register_at_fork(after_in_child=_forget)
    elif _current.closed and isinstance(_current.transport, MpiTransport):
        _current.transport.free_detector()
    _current = engine


def _forget() -> None:
    """Take the hooks out of a forked child, whose end is no rank's."""
    global _current
    _current = None


def _on_exception(
    previous: Callable[..., object],
    tell: Tell,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    collectives = _current
    cause = _behind(error, collectives)
    tell(cause, error)
    previous(kind, error, trace)
    if collectives is None or collectives.closed:
        return
    # By its first number, as the launcher calls it: others may have been lost.
    who = f"rank {collectives.member} of {len(collectives.numbers)}"
    follows = isinstance(cause, PeerFailedError)
    what = f"stops: {cause}" if follows else f"failed: {type(cause).__name__}: {cause}"
    logger.error("%s %s", who, what)
    collectives.fail(f"{type(cause).__name__}: {cause}{error_location(trace)}")
    if follows:
        time.sleep(FOLLOWER_PAUSE_S)
    _end_within(EXIT_DEADLINE_S)


def _behind(error: BaseException, collectives: Engine | None) -> BaseException:
    """The error between ranks that TensorFlow has turned into one of its own, if so."""
    last = collectives.last_error if collectives is not None else None
    return last if last is not None and str(last) in str(error) else error


def _end_within(seconds: float) -> None:
    def end() -> None:
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _leave(watch: ExitCodeWatch) -> None:
    watch.close()
    sys.stdout.flush()
    if _current is not None:
        _current.transport.leave(watch.code)


class ExitCodeWatch:
    """Learns the code that is given to ``sys.exit``, which Python tells no function at exit.

    Without it a rank that ends with an exit code of its own while the others are busy would wait
    for them as after a clean end, instead of ending the job.

    A program ends by a ``SystemExit`` that nobody catches, which the interpreter then asks for its
    ``code``. That is the one reader without a caller in Python: what a program catches, looks at
    and continues from is not taken for its end. A program that raises ``SystemExit`` itself is not
    seen, as classes that are built in can't be changed.

    Attributes:
        code: 0 until the interpreter has asked.
    """

    def __init__(self) -> None:
        self.code = 0
        self._before = sys.exit
        sys.exit = self._exit

    def close(self) -> None:
        """Leave Python as it was."""
        sys.exit = self._before

    def _exit(self, status: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status), as ``sys.exit`` of Python does."""
        raise _Exit(self, status)

    def note(self, code: object) -> None:
        """Note the code the interpreter asks for; what is no number it prints, and ends with 1."""
        self.code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1


class _Exit(SystemExit):
    """Tells the watch when the interpreter reads its code."""

    def __init__(self, watch: ExitCodeWatch, *status: object) -> None:
        super().__init__(*status)
        self._watch = watch
        self._code = status[0]

    @property
    def code(self) -> Any:
        if _nobody_calls():
            self._watch.note(self._code)
        return self._code

    @code.setter
    def code(self, value: Any) -> None:
        self._code = value

    def __reduce__(self) -> tuple[type[SystemExit], tuple[object]]:
        return SystemExit, (self._code,)


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__
_Exit.__module__ = SystemExit.__module__


def _nobody_calls() -> bool:
    """Whether no code in Python reads the attribute, this function and the property aside."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False
