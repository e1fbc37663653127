"""The state of callbacks, such as the best loss that ``EarlyStopping`` has seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

__all__ = ["callback_arrays", "callback_states", "restore_callbacks", "stopped_early"]

# The attributes with the state of Keras' own callbacks. The callbacks reset them when training
# begins.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}
_ARRAYS = "callbacks"


def callback_states(
    callbacks: Sequence[Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray]]:
    """Return the states of all callbacks that have one.

    A custom callback has a state if it has methods ``get_state() -> dict`` and ``set_state(dict)``.
    The values of the state may be numbers, strings, None, arrays or lists of arrays.

    Returns:
        Two values. The first is a dictionary that maps each callback to its plain values. The
        second contains copies of all arrays. A callback's key is its class name. A second callback
        of the same class gets a number, as in ``EarlyStopping 2``.
    """
    plain: dict[str, dict[str, Any]] = {}
    arrays: dict[str, np.ndarray] = {}
    for key, callback in _numbered(callbacks):
        for name, value in _get_state(callback).items():
            entry = plain.setdefault(key, {})
            if isinstance(value, np.ndarray) and value.ndim:
                arrays[f"{_ARRAYS}/{key}/{name}"] = value.copy()
            elif isinstance(value, (list, tuple)) and any(
                isinstance(item, np.ndarray) for item in value
            ):
                entry[name] = {_ARRAYS: len(value)}
                for index, array in enumerate(value):
                    arrays[f"{_ARRAYS}/{key}/{name}/{index}"] = np.array(array)
            else:
                # NumPy scalars become Python's.
                entry[name] = value.item() if hasattr(value, "item") else value
    return plain, arrays


def restore_callbacks(
    callbacks: Sequence[Any],
    plain: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray],
) -> list[str]:
    """Restore the result of ``callback_states``.

    Returns:
        The names of the saved callbacks that are not among ``callbacks``.
    """
    missing = dict.fromkeys(plain)
    for key, callback in _numbered(callbacks):
        if key not in missing:
            continue
        del missing[key]
        prefix = f"{_ARRAYS}/{key}/"
        state = {
            name: [arrays[f"{prefix}{name}/{index}"] for index in range(value[_ARRAYS])]
            if isinstance(value, Mapping) and _ARRAYS in value
            else value
            for name, value in plain[key].items()
        }
        for path, array in arrays.items():
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and "/" not in name:
                state[name] = array
        if _has_state_methods(callback):
            callback.set_state(state)
        else:
            for name in _attributes(callback):
                if name in state:
                    setattr(callback, name, state[name])
    return list(missing)


def stopped_early(callbacks: Sequence[Any], epochs: int) -> bool:
    """Return whether ``EarlyStopping`` ended training after ``epochs`` and would do so again."""
    return any(
        isinstance(callback, keras.callbacks.EarlyStopping)
        and 0 < callback.stopped_epoch == epochs - 1
        and callback.wait >= callback.patience
        for callback in callbacks
    )


def callback_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return those arrays of a checkpoint that belong to callbacks."""
    return {key: array for key, array in arrays.items() if key.startswith(f"{_ARRAYS}/")}


def _numbered(callbacks: Sequence[Any]) -> Iterable[tuple[str, Any]]:
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name} {counts[name]}", callback


def _get_state(callback: Any) -> dict[str, Any]:
    if _has_state_methods(callback):
        return dict(callback.get_state())
    names = _attributes(callback)
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _has_state_methods(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _attributes(callback: Any) -> tuple[str, ...]:
    return next((names for kind, names in _ATTRIBUTES.items() if isinstance(callback, kind)), ())
