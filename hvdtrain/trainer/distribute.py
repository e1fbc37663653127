"""``hvdtrain.distribute(model)``, which also accepts models that are not built yet."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdtrain import world
from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.private_api import keras as private_keras
from hvdtrain.private_api.keras import flatten_layers, output_spec, set_untracked
from hvdtrain.private_api.keras_data import is_tf_dataset
from hvdtrain.trainer.allreduce import Allreduce
from hvdtrain.trainer.data.batch_stream import stream_kind
from hvdtrain.trainer.data.batch_structure import is_absent
from hvdtrain.trainer.model_parts import optimizers_of, overrides, plain_optimizers_of
from hvdtrain.trainer.model_patch import ModelPatch, Strategy
from hvdtrain.trainer.model_sync import check_same_model

__all__ = ["distribute"]

# Methods that build a model from their data.
_BUILDING = ("fit", "evaluate", "predict", "train_on_batch")
_DEFERRED = "_hvdtrain_deferred"
_ADVICE = (
    "Begin the model with keras.Input(shape=…), or call model.build(input_shape) or model(x[:1]) "
    "before hvdtrain.distribute(model)."
)


def distribute(
    model: keras.Model, *, presharded: bool = False, sparse_as_dense: bool = False
) -> keras.Model:
    """Make ``fit``, ``evaluate`` and ``predict`` of a model work on all ranks together.

    Training on N ranks with ``batch_size=B`` is equivalent to training in one process with batches
    of N * B samples:

    - Weights, optimizer state and metrics start with the chief's values.
    - The input is sharded, and every rank runs the same number of steps.
    - Gradients are averaged over the ranks. Each rank's weight is its number of samples.
    - The losses and metrics of an epoch cover all samples.
    - Only the chief shows progress and writes files.
    - Dropout layers drop different units on each rank.
    - The model is saved as a plain Keras model.

    This list describes ``--mode allreduce``. Other modes, such as ``--mode local-sgd``, synchronize
    the ranks differently.

    A model that overrides ``train_step`` may apply several optimizers, as a GAN does. These
    optimizers must be attributes of the model, or attributes of models and layers inside it.

    Args:
        model: A compiled model. A model that isn't built yet is built from the first batch of data
            that it receives. Call ``distribute`` again after ``compile``, or after changing
            ``trainable``.
        presharded: True if each rank passes only its own part of the data to ``fit``, as in
            Horovod. False if each rank passes all data.
        sparse_as_dense: Whether to convert sparse gradients (``tf.IndexedSlices``), such as those
            of ``keras.layers.Embedding``, to dense tensors before they are averaged. Dense tensors
            are faster if the batches of all ranks together use most rows of the embedding table.
            With some optimizers, such as Adam, they change the update of rows that occur several
            times in a batch.

    Returns:
        The same model.

    Raises:
        ModelError: If the model is not compiled, can't be built from its data, or can't be
            distributed. If ``presharded`` is used in an elastic job. If ``sparse_as_dense`` is used
            in a mode that does not average gradients.
        MismatchError: If ranks have different models. All ranks raise this error.
    """
    with world.collectives().section("distribute"):
        _check_compiled(model)
        _restore_methods(model)
        if overrides(model, "call") and not _is_built(model):
            _defer(model, lambda: _distribute(model, presharded, sparse_as_dense))
        else:
            _distribute(model, presharded, sparse_as_dense)
    return model


def _distribute(model: keras.Model, presharded: bool, sparse_as_dense: bool) -> None:
    collectives = world.collectives()
    settings = world.settings()
    private_keras.check(model, plain_optimizers_of(model))
    _check_built(model)
    optimizers = optimizers_of(model)
    if len(optimizers) > 1 and settings.has_servers:
        raise ModelError(
            f"The model {model.name!r} has {len(optimizers)} optimizers, but parameter servers "
            "apply one. Train it with --mode allreduce."
        )
    # With several optimizers, each one's variables are unknown until it is first applied.
    if len(optimizers) == 1 and collectives.rank not in world.roles().servers:
        (optimizer,) = optimizers
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    if presharded and collectives.survives_losses:
        raise ModelError(
            "In an elastic job (--elastic) every rank must receive the whole data, so that the "
            "other ranks can train on the rest of a lost rank's part. Leave presharded=True out, "
            "or use --max-restarts instead of --elastic."
        )
    if sparse_as_dense and (settings.has_servers or settings.is_local_sgd):
        raise ModelError(
            "sparse_as_dense=True needs a mode in which ranks average gradients, got --mode "
            f"{settings.mode}; leave sparse_as_dense out."
        )
    strategy = _choose_strategy(settings, sparse_as_dense)
    patch = ModelPatch(model, collectives, settings, strategy, presharded=presharded)
    # The outer optimizer of local SGD changes weights even on one rank.
    if collectives.size > 1 or settings.towers > 1 or settings.is_local_sgd:
        check_same_model(model, collectives)
        patch.install()
    else:
        patch.install_with_checkpoint()


def _choose_strategy(settings: Settings, sparse_as_dense: bool) -> Strategy:
    if settings.has_servers:
        from hvdtrain.trainer.served.served_strategy import ParameterServers

        return ParameterServers(world.roles())
    if settings.is_local_sgd:
        from hvdtrain.trainer.local_sgd.local_strategy import LocalSgd

        return LocalSgd()
    return Allreduce(sparse_as_dense=sparse_as_dense)


def _check_compiled(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ModelError(f"hvdtrain.distribute takes a Keras 3 model, got {type(model).__name__}.")
    if not model.compiled:
        raise ModelError(
            f"The model {model.name!r} is not compiled. Call model.compile(optimizer=…, loss=…) "
            "before hvdtrain.distribute(model)."
        )
    if not optimizers_of(model):
        raise ModelError(
            f"The model {model.name!r} has no optimizer. Call model.compile(optimizer=…), or make "
            "the optimizers that its train_step applies attributes of the model."
        )


def _is_built(model: keras.Model) -> bool:
    return (bool(model.variables) or model.built) and not _unbuilt_layers(model)


def _check_built(model: keras.Model) -> None:
    if _is_built(model):
        return
    names = _unbuilt_layers(model)
    listed = f"{', '.join(names[:5])} {'has' if len(names) == 1 else 'have'}" if names else "it has"
    raise ModelError(
        f"The model {model.name!r} is not built: {listed} no variables that could be broadcast. "
        + _ADVICE
    )


def _unbuilt_layers(model: keras.Model) -> list[str]:
    """Return the names of layers that will create variables when they are built."""
    return [
        layer.name
        for layer in ([] if model.built else flatten_layers(model))
        if not layer.built and type(layer).build is not keras.layers.Layer.build
    ]


def _defer(model: keras.Model, distribute: Callable[[], None]) -> None:
    """Make the model wait for its first data. It is then built from the data and distributed."""

    def deferred(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(model, name))
        def call(x: Any = None, *args: Any, **options: Any) -> Any:
            with world.collectives().section(f"first {name} of a model"):
                x = _build_from(model, x)
                _restore_methods(model)
                distribute()
            return getattr(model, name)(x, *args, **options)

        return call

    def apply(*args: Any, **options: Any) -> None:
        # Otherwise ranks would silently train different weights with different gradients.
        raise ModelError(
            f"The model {model.name!r} was not built when hvdtrain.distribute(model) was called, "
            f"so its weights are not equal on all ranks yet. {_ADVICE}"
        )

    for name in _BUILDING:
        set_untracked(model, name, deferred(name))
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        set_untracked(optimizer, "apply", apply)
    set_untracked(model, _DEFERRED, optimizers)


def _restore_methods(model: keras.Model) -> None:
    """Undo ``_defer``."""
    if _DEFERRED in vars(model):
        for optimizer in vars(model).pop(_DEFERRED):
            vars(optimizer).pop("apply", None)
        for name in _BUILDING:
            vars(model).pop(name, None)


def _build_from(model: keras.Model, x: Any) -> Any:
    """Build the model from the first batch of the data ``x``.

    Return the complete data. If ``x`` is a generator, this is a new generator that yields the first
    batch again.
    """
    if _is_built(model):
        return x  # the user has built it after distribute
    try:
        first, x = _first_inputs(x)
        output_spec(model, keras.tree.map_structure(_symbol, first))
    except Exception as error:
        raise ModelError(
            f"The model {model.name!r} was not built when hvdtrain.distribute(model) was called, "
            f"and can't be built from its data: {error}. {_ADVICE}"
        ) from error
    return x


def _first_inputs(x: Any) -> tuple[Any, Any]:
    """Return the inputs in the first batch, or their specs, and the complete data."""
    if is_tf_dataset(x):
        batch = x.element_spec
    elif isinstance(x, keras.utils.PyDataset):
        batch = x[0]
    elif isinstance(x, types.GeneratorType):
        first = list(itertools.islice(x, 1))
        batch = first[0] if first else None
        x = (entry for part in (first, x) for entry in part)
    elif stream_kind(x):
        batch = next(iter(x), None)
    else:
        return x, x
    return keras.utils.unpack_x_y_sample_weight(batch)[0], x


def _symbol(leaf: Any) -> Any:
    if is_absent(leaf):
        return None
    shape = tuple(leaf.shape) if hasattr(leaf, "shape") else np.shape(leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    # Any number of rows, because the last batch may be shorter.
    return keras.KerasTensor((None, *shape[1:]), keras.backend.standardize_dtype(dtype))
