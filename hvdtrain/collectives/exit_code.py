"""Which exit code this program is about to end with, for functions that run at its end."""

from __future__ import annotations

import ctypes
import gc
import sys
from types import MemberDescriptorType
from typing import Any, NoReturn

__all__ = ["ExitCodeWatch"]


class ExitCodeWatch:
    """From now on knows the code, of which Python tells nobody, and functions at exit least of all.

    A program ends by a ``SystemExit`` that nobody catches, which the interpreter then asks for its
    ``code``. That is the one reader without a caller in Python: what a program catches, looks at
    and goes on from is not taken for its end. ``sys.exit`` is replaced because before Python 3.12
    it makes no exception that could be asked.

    Attributes:
        code: 0 until the interpreter has asked.
    """

    def __init__(self) -> None:
        self.code = 0
        self._attributes: dict[str, Any] = gc.get_referents(SystemExit.__dict__)[0]
        self._member: MemberDescriptorType = self._attributes["code"]
        self._exit = sys.exit
        sys.exit = _exit
        self._replace(property(self._read, self._member.__set__, self._member.__delete__))

    def close(self) -> None:
        """Leave Python as it was."""
        self._replace(self._member)
        sys.exit = self._exit

    def _read(self, error: SystemExit) -> object:
        code = self._member.__get__(error)
        if _nobody_calls():
            self.code = _as_number(code)
        return code

    def _replace(self, attribute: object) -> None:
        self._attributes["code"] = attribute
        # What was found under the name before is remembered until the type says that it changed.
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status), as ``sys.exit`` of Python does."""
    raise SystemExit(status)


def _nobody_calls() -> bool:
    """Whether no code in Python reads the attribute, this function and the reader aside."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False


def _as_number(code: object) -> int:
    """What the process ends with: the interpreter prints what is no number, and ends with 1."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
