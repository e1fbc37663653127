"""TensorFlow's global seed, and where the numbers that it draws from it stand."""

from __future__ import annotations

import random
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

__all__ = ["current", "current_seed", "restore", "set_unless_set"]


def set_unless_set(seed: int) -> None:
    """Set TensorFlow's global seed, unless the program has chosen one already."""
    if current_seed() is None:
        tf.random.set_seed(seed)


def current_seed() -> int | None:
    """The global seed, None if not set."""
    # There is no public way to ask: reading it through tf.compat would draw from the generator.
    seed = context.global_seed()
    return None if seed is None else int(seed)


def current() -> tuple[int, Any] | None:
    """The global seed and the state of the generator of operations' seeds; None if not set."""
    seed = current_seed()
    return None if seed is None else (seed, _operations().getstate())


def restore(seed: int, state: Any) -> None:
    """Go on where ``current`` was."""
    tf.random.set_seed(seed)
    _operations().setstate(state)


def _operations() -> random.Random:
    generator: random.Random = context.context()._rng
    return generator
