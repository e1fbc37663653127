"""The model as a file in Keras' own format, beside the checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import keras

__all__ = ["export_model"]


def export_model(model: keras.Model, path: str) -> None:
    """Save the model; the file at the path is always a whole one: the former or this.

    Raises:
        OSError: It can't be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.stem}-{os.getpid()}.keras")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        model.save(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
