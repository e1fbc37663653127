"""Models that Keras builds from the first data they see, as a Sequential without an Input."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.keras.data.batch_stream import stream_kind
from hvdtrain.keras.data.batch_structure import is_absent
from hvdtrain.keras.model_parts import optimizers_of
from hvdtrain.private_api.keras import flatten_layers, output_spec, set_untracked

__all__ = ["check_built", "forget", "is_built", "postpone"]

_WAITING = ("fit", "evaluate", "predict", "train_on_batch")
_MARK = "_hvdtrain_waits_for_data"
_ADVICE = (
    "Begin it with keras.Input(shape=…), or call model.build(input_shape) or model(x[:1]), before "
    "hvdtrain.distribute(model)."
)


def is_built(model: keras.Model) -> bool:
    """Whether the model has all of its variables."""
    return (bool(model.variables) or model.built) and not _lacking(model)


def check_built(model: keras.Model) -> None:
    """Check that there are variables to broadcast.

    Raises:
        ModelError: Names the layers that have none yet.
    """
    if is_built(model):
        return
    names = _lacking(model)
    listed = f"{', '.join(names[:5])} {'has' if len(names) == 1 else 'have'}" if names else "it has"
    raise ModelError(
        f"The model {model.name!r} is not built: {listed} no variables that could be broadcast. "
        + _ADVICE
    )


def _lacking(model: keras.Model) -> list[str]:
    """Names of the layers that still have variables to make."""
    return [
        layer.name
        for layer in ([] if model.built else flatten_layers(model))
        if not layer.built and type(layer).build is not keras.layers.Layer.build
    ]


def postpone(model: keras.Model, distribute: Callable[[], Any]) -> None:
    """Build the model when its first data come, and call ``distribute`` then.

    Raises:
        ModelError: In ``fit`` and the others: the data don't tell, or the model can't be built.
    """

    def waiting(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(model, name))
        def call(x: Any = None, *args: Any, **options: Any) -> Any:
            with world.collectives().section(f"first {name} of a model"):
                x = _build(model, x)
                forget(model)
                distribute()
            return getattr(model, name)(x, *args, **options)

        return call

    def apply(*args: Any, **options: Any) -> Any:
        # Not to be done in silence: weights would differ between ranks, and gradients stay apart.
        raise ModelError(
            f"The model {model.name!r} was not built when hvdtrain.distribute(model) was called, "
            f"so that nothing is alike on all ranks yet. {_ADVICE}"
        )

    for name in _WAITING:
        set_untracked(model, name, waiting(name))
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        set_untracked(optimizer, "apply", apply)
    set_untracked(model, _MARK, optimizers)


def forget(model: keras.Model) -> None:
    """Let the model's and its optimizers' own methods be seen again."""
    if _MARK in vars(model):
        for optimizer in vars(model).pop(_MARK):
            vars(optimizer).pop("apply", None)
        for name in _WAITING:
            vars(model).pop(name, None)


def _build(model: keras.Model, x: Any) -> Any:
    """Build the model and return the data, of which a generator's first batch was looked at."""
    if is_built(model):
        return x  # the user did it since
    try:
        first, x = _first_inputs(x)
        output_spec(model, keras.tree.map_structure(_symbol, first))
    except Exception as error:
        raise ModelError(
            f"The model {model.name!r} was not built when hvdtrain.distribute(model) was called, "
            f"and can't be from its data: {error}. {_ADVICE}"
        ) from error
    return x


def _first_inputs(x: Any) -> tuple[Any, Any]:
    """Return the inputs of a first batch, or their specs; and data that still begin with it."""
    if isinstance(x, tf.data.Dataset):
        batch = x.element_spec
    elif isinstance(x, keras.utils.PyDataset):
        batch = x[0]
    elif isinstance(x, types.GeneratorType):
        batch = next(x, None)
        x = _begun(batch, x)
    elif stream_kind(x):
        batch = next(iter(x), None)
    else:
        return x, x
    return keras.utils.unpack_x_y_sample_weight(batch)[0], x


def _begun(batch: Any, others: Iterator[Any]) -> Iterator[Any]:
    if batch is not None:
        yield batch
    yield from others


def _symbol(leaf: Any) -> Any:
    if is_absent(leaf):
        return None
    shape = tuple(leaf.shape) if hasattr(leaf, "shape") else np.shape(leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    # Of any number of rows, as the last batch may be a short one.
    return keras.KerasTensor((None, *shape[1:]), keras.backend.standardize_dtype(dtype))
