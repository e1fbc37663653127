"""The states of callbacks: everything they carry from one epoch to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

__all__ = ["callback_states", "kept_by_callbacks", "restore_callbacks", "stopped_early"]

# What Keras' own callbacks keep and reset when training begins.
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
    """The states of the callbacks that have one.

    A callback of the user's has one if it has the methods ``get_state() -> dict`` and
    ``set_state(dict)``, with values that are numbers, texts, None, arrays or lists of arrays.

    Returns:
        The plain values, by the name of the callback's class and, from the second callback of a
        class on, its number; and copies of the arrays.
    """
    plain: dict[str, dict[str, Any]] = {}
    arrays: dict[str, np.ndarray] = {}
    for key, callback in _numbered(callbacks):
        for name, value in _state_of(callback).items():
            entry = plain.setdefault(key, {})
            if isinstance(value, np.ndarray) and value.ndim:
                arrays[f"{_ARRAYS}/{key}/{name}"] = value.copy()
            elif _is_list_of_arrays(value):
                entry[name] = {_ARRAYS: len(value)}
                for index, array in enumerate(value):
                    arrays[f"{_ARRAYS}/{key}/{name}/{index}"] = np.array(array)
            else:
                entry[name] = value.item() if hasattr(value, "item") else value  # NumPy's scalars
    return plain, arrays


def restore_callbacks(
    callbacks: Sequence[Any],
    plain: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray],
) -> list[str]:
    """Restore what ``callback_states`` returned.

    Returns:
        Names of saved callbacks that are missing now.
    """
    missing = dict.fromkeys(plain)
    for key, callback in _numbered(callbacks):
        if key not in missing:
            continue
        del missing[key]
        state = {
            name: [arrays[f"{_ARRAYS}/{key}/{name}/{i}"] for i in range(value[_ARRAYS])]
            if isinstance(value, Mapping) and _ARRAYS in value
            else value
            for name, value in plain[key].items()
        }
        prefix = f"{_ARRAYS}/{key}/"
        for path, array in arrays.items():
            if path.startswith(prefix) and "/" not in path[len(prefix) :]:
                state[path[len(prefix) :]] = array
        _give(callback, state)
    return list(missing)


def stopped_early(callbacks: Sequence[Any], epochs: int) -> bool:
    """Whether EarlyStopping ended training after so many epochs, and its patience is no larger."""
    return any(
        isinstance(callback, keras.callbacks.EarlyStopping)
        and 0 < callback.stopped_epoch == epochs - 1
        and callback.wait >= callback.patience
        for callback in callbacks
    )


def kept_by_callbacks(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Select the arrays that ``callback_states`` made."""
    return {key: array for key, array in arrays.items() if key.startswith(f"{_ARRAYS}/")}


def _numbered(callbacks: Sequence[Any]) -> Iterable[tuple[str, Any]]:
    met: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        met[name] += 1
        yield name if met[name] == 1 else f"{name} {met[name]}", callback


def _state_of(callback: Any) -> dict[str, Any]:
    if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
        return dict(callback.get_state())
    names = _attributes(callback)
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _give(callback: Any, state: dict[str, Any]) -> None:
    if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
        callback.set_state(state)
        return
    for name in _attributes(callback):
        if name in state:
            setattr(callback, name, state[name])


def _attributes(callback: Any) -> tuple[str, ...]:
    return next((names for kind, names in _ATTRIBUTES.items() if isinstance(callback, kind)), ())


def _is_list_of_arrays(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, np.ndarray) for v in value)
