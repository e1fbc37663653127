"""TensorFlow's global random seed, and the state of the generator that depends on it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.private_api.tensorflow import global_seed, operation_seeds

__all__ = ["current", "current_seed", "restore", "set_unless_set"]


def current_seed() -> int | None:
    """Return the global seed, or None if it is not set."""
    seed = global_seed()
    return None if seed is None else int(seed)


def set_unless_set(seed: int) -> None:
    """Set the global seed unless the program has set it."""
    if current_seed() is None:
        tf.random.set_seed(seed)


def current() -> tuple[int, Any] | None:
    """Return the global seed, and the state of the generator of operation seeds; None if unset."""
    seed = current_seed()
    return None if seed is None else (seed, operation_seeds().getstate())


def restore(seed: int, state: Any) -> None:
    """Restore the global seed and the generator's state that ``current`` has returned."""
    tf.random.set_seed(seed)
    operation_seeds().setstate(state)
