"""The global random states of Python, NumPy, Keras and its backend in this process.

The random states of layers, such as dropout, are not included because they are variables of the
model. The state of ``tf.random.uniform`` and similar functions within a ``tf.function`` can't be
saved, because only the running graph has it. JAX has no global random state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvdtrain.private_api.keras import (
    global_generator,
    make_global_generator,
    set_global_generator,
)
from hvdtrain.trainer.variables import array_of, assign

__all__ = ["random_state", "restore_random_state", "tensorflow_seed"]

_UNSET = -1


def random_state() -> dict[str, np.ndarray]:
    """Return the random states as arrays of the same names, shapes and dtypes on all ranks."""
    generator = global_generator()  # None until keras.random is used
    return {
        "python": _pack_python(random.getstate()),
        "numpy": _pack_numpy(np.random.get_state(legacy=False)),
        "keras": np.full(2, _UNSET, np.int64)
        if generator is None
        else array_of(generator.state).astype(np.int64),
        **_backend_state(),
    }


def restore_random_state(state: Mapping[str, np.ndarray]) -> None:
    """Restore the result of ``random_state``. States of other backends are skipped."""
    # Keras comes first, because creating its generator draws from Python's generator.
    if state["keras"][0] == _UNSET:
        set_global_generator(None)
    else:
        assign(make_global_generator().state, state["keras"])
    _restore_backend_state(state)
    _restore_numpy(state["numpy"])
    random.setstate(_unpack_python(state["python"]))


def tensorflow_seed() -> int | None:
    """Return TensorFlow's global seed. None if it is not set, or if TensorFlow is not loaded."""
    if sys.modules.get("tensorflow") is None:
        return None
    from hvdtrain.frameworks.tensorflow import random_seed

    return random_seed.current_seed()


def _backend_state() -> dict[str, np.ndarray]:
    if keras.backend.backend() == "tensorflow":
        from hvdtrain.frameworks.tensorflow import random_seed

        seed, operations = random_seed.current() or (_UNSET, random.Random(0).getstate())
        state = _pack_python(operations)
        return {"tensorflow seed": np.array(seed, np.int64), "tensorflow": state}
    if keras.backend.backend() == "torch":
        from hvdtrain.frameworks.torch import devices

        return devices.random_state()
    return {}


def _restore_backend_state(state: Mapping[str, np.ndarray]) -> None:
    if keras.backend.backend() == "tensorflow" and state["tensorflow"].any():
        from hvdtrain.frameworks.tensorflow import random_seed

        seed = int(state["tensorflow seed"])
        if seed != _UNSET:
            random_seed.restore(seed, _unpack_python(state["tensorflow"]))
    if keras.backend.backend() == "torch":
        from hvdtrain.frameworks.torch import devices

        devices.restore_random_state(state)


def _pack_python(state: Any) -> np.ndarray:
    """Return the state of Python's random generator as an array of uint64.

    The array contains the version, the words of the state, and the spare Gaussian number.
    """
    version, words, gauss = state
    bits = np.array([np.nan if gauss is None else gauss], np.float64).view(np.uint64)
    return np.concatenate([np.array([version, *words], np.uint64), bits])


def _unpack_python(packed: np.ndarray) -> Any:
    gauss = float(packed[-1:].view(np.float64)[0])
    words = tuple(int(word) for word in packed[1:-1])
    return int(packed[0]), words, None if np.isnan(gauss) else gauss


def _pack_numpy(state: Any) -> np.ndarray:
    """Return the state of NumPy's global random generator as an array of uint64.

    The array contains the key, the position and the spare Gaussian number. Only the bit generator
    MT19937 is supported. For other generators, the array contains zeros.
    """
    if state["bit_generator"] != "MT19937":
        return np.zeros(627, np.uint64)
    rest = np.array([state["state"]["pos"], state["has_gauss"]], np.uint64)
    gauss = np.array([state["gauss"]], np.float64).view(np.uint64)
    return np.concatenate([state["state"]["key"].astype(np.uint64), rest, gauss])


def _restore_numpy(packed: np.ndarray) -> None:
    key = packed[:624].astype(np.uint32)
    if key.any():
        gauss = float(packed[626:].view(np.float64)[0])
        np.random.set_state(("MT19937", key, int(packed[624]), int(packed[625]), gauss))
