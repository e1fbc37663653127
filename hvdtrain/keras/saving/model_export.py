"""The model in Keras' own format, beside the checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import keras

from hvdtrain.errors import CheckpointError

__all__ = ["export_model"]


def export_model(model: keras.Model, path: str) -> None:
    """Save ``model`` so that the file at ``path`` is always a whole one: the former or this.

    Raises:
        CheckpointError: It can't be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.stem}-{os.getpid()}.keras")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        model.save(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"The model can't be saved as {path}: {error.strerror or error}."
        ) from None
