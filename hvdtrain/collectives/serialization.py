"""Python objects to bytes and back: JSON by itself, pickle only where the caller asks for it."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np

from hvdtrain.collectives.interface import Codec
from hvdtrain.errors import ConfigurationError

__all__ = ["decode", "encode"]


def encode(obj: Any, codec: Codec) -> np.ndarray:
    """The object as a flat uint8 array.

    Raises:
        ConfigurationError: JSON can't hold the object, or the codec is unknown.
    """
    if codec == "pickle":
        return np.frombuffer(pickle.dumps(obj), np.uint8)
    if codec != "json":
        raise ConfigurationError(f"codec={codec!r} is not known; expected 'json' or 'pickle'.")
    try:
        text = json.dumps(obj)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"An object of type {type(obj).__name__} can't be sent as JSON ({error}). Send plain "
            "dicts, lists, strings and numbers, or pass codec='pickle' if all ranks are yours."
        ) from None
    return np.frombuffer(text.encode(), np.uint8)


def decode(data: np.ndarray, codec: Codec) -> Any:
    """The object that ``encode`` made ``data`` from; JSON turns tuples into lists."""
    if codec == "pickle":
        return pickle.loads(data.tobytes())
    return json.loads(data.tobytes().decode())
