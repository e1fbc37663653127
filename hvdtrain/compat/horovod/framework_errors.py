"""Conversion of hvdtrain's errors, so that they have the type that Horovod raises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["raise_as_in_framework"]


@contextmanager
def raise_as_in_framework() -> Iterator[None]:
    """Convert hvdtrain's errors in the ``with`` block to errors that are also TensorFlow's.

    If the program doesn't use TensorFlow, nothing is converted. With PyTorch, Horovod raises
    RuntimeError, and hvdtrain's errors are RuntimeErrors anyway.
    """
    if "tensorflow" not in sys.modules:
        yield
        return
    # Imports TensorFlow, which the program has already done.
    from hvdtrain.frameworks.tensorflow.tf_errors import raise_as_in_tensorflow

    with raise_as_in_tensorflow():
        yield
