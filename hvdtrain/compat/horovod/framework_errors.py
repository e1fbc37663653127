"""Errors that also have the type that Horovod raises with the program's framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["raise_as_in_framework"]


@contextmanager
def raise_as_in_framework() -> Iterator[None]:
    """Convert hvdtrain's errors in the block to errors that are also TensorFlow's.

    Without TensorFlow, errors stay as they are: with PyTorch, Horovod raises RuntimeError, the base
    class of hvdtrain's errors.
    """
    if "tensorflow" not in sys.modules:
        yield
        return
    # Imports TensorFlow, which the program has already done.
    from hvdtrain.tensorflow.tf_errors import raise_as_in_tensorflow

    with raise_as_in_tensorflow():
        yield
