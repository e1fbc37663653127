"""``hvdtrain.distribute(model)``: a compiled Keras model trains on all ranks together."""

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
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.tape import check_mode
from hvdtrain.keras.data.batch_stream import stream_kind
from hvdtrain.keras.data.batch_structure import is_absent
from hvdtrain.keras.local_sgd.local_patch import LocalModelPatch
from hvdtrain.keras.model_parts import optimizers_of, overrides, plain_optimizers_of
from hvdtrain.keras.model_patch import ModelPatch
from hvdtrain.keras.model_sync import check_same_model
from hvdtrain.keras.optimizer_patch import distribute_optimizer
from hvdtrain.private_api import keras as private_keras
from hvdtrain.private_api.keras import flatten_layers, output_spec, set_untracked

__all__ = ["DistributedOptimizer", "check_built", "distribute", "forget", "is_built", "postpone"]


def distribute(model: keras.Model, *, presharded: bool = False) -> keras.Model:
    """Let ``fit``, ``evaluate`` and ``predict`` of ``model`` work on all ranks together.

    Training on N ranks with ``batch_size=B`` equals training one process on batches of N * B:
    weights, optimizer state and metrics start as the chief's; the input is shared out; gradients
    are averaged, weighted by samples; metrics and losses of an epoch are those of all samples;
    every rank runs the same number of steps. Progress and files come from the chief alone, dropout
    differs by rank, and the model is saved as if hvdtrain had never been there. That is
    so with ``--mode allreduce``; in other modes ranks meet in other ways.

    A ``train_step`` of the model's own may apply several optimizers, as that of a GAN does: those
    that are attributes of the model, or of what is in it.

    Args:
        model: Compiled. One that is not built yet is when it is first given data. Compile again, or
            change what is trainable, and it must be distributed again.
        presharded: Each rank passes its own part of the data, as Horovod's users do, instead of
            the whole.

    Returns:
        The same model.

    Raises:
        ModelError: The model is not compiled, holds parts that are not built and has no call() that
            builds them, or can't be distributed; or ranks have data of their own in an elastic job.
        MismatchError: Ranks have different models; raised on all of them.
    """
    with world.collectives().section("distribute"):
        _check_ready(model)
        forget(model)
        if overrides(model, "call") and not is_built(model):
            postpone(model, lambda: _distribute(model, presharded))
        else:
            _distribute(model, presharded)
    return model


def _distribute(model: keras.Model, presharded: bool) -> None:
    collectives = world.collectives()
    settings = world.settings()
    private_keras.check(model, plain_optimizers_of(model))
    check_built(model)
    optimizers = optimizers_of(model)
    if len(optimizers) > 1 and settings.has_servers:
        raise ModelError(
            f"The model {model.name!r} has {len(optimizers)} optimizers, and parameter servers "
            "apply one. Train it with --mode allreduce."
        )
    # Of several each knows its variables when it is first applied.
    if len(optimizers) == 1 and collectives.rank not in world.roles().servers:
        (optimizer,) = optimizers
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    if presharded and collectives.survives_losses:
        raise ModelError(
            "In an elastic job (--elastic) every rank must be given the whole data, so that the "
            "others can do what is left of a lost rank's part. Leave presharded=True out, or use "
            "--max-restarts in place of --elastic."
        )
    if settings.has_servers:
        from hvdtrain.keras.served.served_patch import ServedModelPatch

        roles = world.roles()
        patch: ModelPatch = ServedModelPatch(model, collectives, presharded, settings, roles)
    elif settings.is_local_sgd:
        patch = LocalModelPatch(model, collectives, presharded, settings)
    else:
        patch = ModelPatch(model, collectives, presharded, settings)
    # An outer optimizer changes weights also where there is one rank.
    if collectives.size > 1 or settings.towers > 1 or settings.is_local_sgd:
        check_same_model(model, collectives)
        patch.install()
    else:
        patch.wait_for_checkpoint()


def DistributedOptimizer(optimizer: Any) -> Any:
    """Let an optimizer average gradients over all ranks before it applies them.

    For training loops that call ``optimizer.apply``; ``distribute`` does it for ``fit``.

    Returns:
        The same optimizer, which is saved and loaded as the plain one.

    Raises:
        ModelError: Not a Keras 3 optimizer, or some ranks are parameter servers.
    """
    check_mode("DistributedOptimizer")
    collectives = world.collectives()
    if collectives.size == 1:
        return optimizer
    reducer = GradientReducer.of_job()
    return distribute_optimizer(optimizer, reducer)


def _check_ready(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"hvdtrain.distribute takes a Keras 3 model, received {type(model).__name__}."
        )
    if not model.compiled:
        raise ModelError(
            f"The model {model.name!r} is not compiled. Call model.compile(optimizer=…, loss=…) "
            "before hvdtrain.distribute(model)."
        )
    if not optimizers_of(model):
        raise ModelError(
            f"The model {model.name!r} has no optimizer. Call model.compile(optimizer=…), or make "
            "those that its train_step applies attributes of the model."
        )


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
