"""The exit code that this program is about to end with, for functions that run at its end."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

__all__ = ["ExitCodeWatch"]


class ExitCodeWatch:
    """Learns the code that is given to ``sys.exit``, which Python tells no function at exit.

    A program ends by a ``SystemExit`` that nobody catches, which the interpreter then asks for its
    ``code``. That is the one reader without a caller in Python: what a program catches, looks at
    and goes on from is not taken for its end. A program that raises ``SystemExit`` itself is not
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
