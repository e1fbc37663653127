"""Errors of hvdtrain that are errors of TensorFlow as well, where Horovod raises those.

``hvdtrain.errors`` knows nothing of TensorFlow. What is raised under Horovod's names is both:
``except hvdtrain.errors.MismatchError`` and ``except tf.errors.FailedPreconditionError`` catch it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from hvdtrain.errors import ConfigurationError, HvdtrainError, MismatchError

__all__ = ["raise_as_in_tensorflow", "refusal"]


class _Mismatch(MismatchError, tf.errors.FailedPreconditionError):
    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class _Configuration(ConfigurationError, tf.errors.InvalidArgumentError):
    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


for _both in (_Mismatch, _Configuration):
    _both.__name__ = _both.__qualname__ = _both.__mro__[1].__name__

_BOTH = {kind.__name__: kind for kind in (_Mismatch, _Configuration)}
# How TensorFlow tells of the error of a Python function in a graph.
_TOLD = re.compile(rf"^({'|'.join(_BOTH)}): (.*?)\nTraceback ", re.MULTILINE | re.DOTALL)


def refusal(message: str) -> ConfigurationError:
    """Return the error for an argument that can't be used."""
    return _Configuration(message)


@contextmanager
def raise_as_in_tensorflow() -> Iterator[None]:
    """Errors of the block are those of TensorFlow, too, if Horovod has one for them.

    And those that TensorFlow made its own errors of in a graph are hvdtrain's again.
    """
    try:
        yield
    except (HvdtrainError, tf.errors.OpError) as error:
        raised = _as_both(error)
        if raised is None:
            raise
        raise raised from error


def _as_both(error: Exception) -> HvdtrainError | None:
    if isinstance(error, HvdtrainError):
        kind = _BOTH.get(type(error).__name__)
        # It may be one already, of an operation within another.
        return None if kind is None or isinstance(error, kind) else kind(str(error))
    told = _TOLD.search(str(error))
    return None if told is None else _BOTH[told[1]](told[2])
