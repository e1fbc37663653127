"""TensorFlow's global seed, and where the numbers that it draws from it stand."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.private_api.tensorflow import global_seed, operation_seeds

__all__ = ["current", "current_seed", "restore", "set_unless_set"]


def current_seed() -> int | None:
    """The global seed, None if not set."""
    seed = global_seed()
    return None if seed is None else int(seed)


def set_unless_set(seed: int) -> None:
    """Set TensorFlow's global seed, unless the program has chosen one already."""
    if current_seed() is None:
        tf.random.set_seed(seed)


def current() -> tuple[int, Any] | None:
    """The global seed and the state of the generator of operations' seeds; None if not set."""
    seed = current_seed()
    return None if seed is None else (seed, operation_seeds().getstate())


def restore(seed: int, state: Any) -> None:
    """Go on where ``current`` was."""
    tf.random.set_seed(seed)
    operation_seeds().setstate(state)
