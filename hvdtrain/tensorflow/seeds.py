"""TensorFlow's global seed."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

__all__ = ["set_unless_set"]


def set_unless_set(seed: int) -> None:
    """Set TensorFlow's global seed, unless the program has chosen one already."""
    # There is no public way to ask: reading it through tf.compat would draw from the generator.
    if context.global_seed() is None:
        tf.random.set_seed(seed)
