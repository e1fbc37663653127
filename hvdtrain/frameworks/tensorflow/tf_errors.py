"""Exceptions of Horovod's API, which are subclasses of both hvdtrain's and TensorFlow's errors.

Scripts may catch ``hvdtrain.errors.MismatchError`` or, as with Horovod,
``tf.errors.FailedPreconditionError``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from hvdtrain.errors import ConfigurationError, HvdtrainError, MismatchError

__all__ = ["raise_as_in_tensorflow"]


class _Mismatch(MismatchError, tf.errors.FailedPreconditionError):
    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class _Configuration(ConfigurationError, tf.errors.InvalidArgumentError):
    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


_BY_NAME = {"MismatchError": _Mismatch, "ConfigurationError": _Configuration}
for _name, _class in _BY_NAME.items():
    _class.__name__ = _class.__qualname__ = _name

# Matches the text of TensorFlow's error if a Python function in a graph raised an exception.
_FROM_PYTHON = re.compile(rf"^({'|'.join(_BY_NAME)}): (.*?)\nTraceback ", re.MULTILINE | re.DOTALL)


@contextmanager
def raise_as_in_tensorflow() -> Iterator[None]:
    """Convert hvdtrain's errors in the ``with`` block to errors that are also TensorFlow's.

    If a Python function in a graph raises an error, TensorFlow wraps it in its own error. In
    this case, the original error is converted.
    """
    try:
        yield
    except (HvdtrainError, tf.errors.OpError) as error:
        converted = _converted(error)
        if converted is None:
            raise
        raise converted from error


def _converted(error: Exception) -> HvdtrainError | None:
    if isinstance(error, HvdtrainError):
        kind = _BY_NAME.get(type(error).__name__)
        return None if kind is None or isinstance(error, kind) else kind(str(error))
    match = _FROM_PYTHON.search(str(error))
    return None if match is None else _BY_NAME[match[1]](match[2])
