"""All of Keras' private API that hvdtrain uses, and whether the Keras that is there has it.

What a user may pass to ``fit`` is defined by what Keras accepts: arrays of many libraries, nested,
with None in places, cast to floatx. Using Keras' own conversions keeps it the same here. Classes
that override private methods of Keras name them where they do it; ``HOOKS`` lists them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import DataError, ModelError
from hvdtrain.private_api import lacks, missing_hooks

SEEN = ("3.14", "3.15")
"""The oldest and the newest Keras that tests have passed with: all with the newest, with the oldest
those that hang on Keras' own code (``make test-keras``)."""

try:
    from keras.src.backend import compute_output_spec
    from keras.src.backend.common import global_state, masking
    from keras.src.backend.tensorflow.trainer import TFEpochIterator
    from keras.src.losses import loss as loss_module
    from keras.src.random import seed_generator
    from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
    from keras.src.trainers import data_adapters
    from keras.src.trainers.data_adapters import (
        array_slicing,
        data_adapter_utils,
        tf_dataset_adapter,
    )
    from keras.src.trainers.data_adapters.array_data_adapter import (
        ArrayDataAdapter,
        can_convert_arrays,
    )

    # Reduce the values of a loss to what is reported; merge a mask into sample weights.
    _reduce_values, _apply_mask = loss_module.reduce_weighted_values, loss_module.apply_mask
    # The generator behind keras.random, which Keras makes where there is none.
    make_global_generator = seed_generator.global_seed_generator
    is_grain_dataset = data_adapters.is_grain_dataset
    is_tf_dataset = data_adapters.is_tf_dataset
    is_torch_dataloader = data_adapters.is_torch_dataloader
    class_sample_weights = data_adapter_utils.class_weight_to_sample_weights
    # Makes a function from (x, y) to (x, y, sample_weight) for use inside Dataset.map.
    class_weight_map = tf_dataset_adapter.make_class_weight_map_fn
    # Divides arrays into what fit trains on, and what it validates with.
    split_validation = array_slicing.train_validation_split
    # The mask that a layer leaves with its output, or None.
    get_mask = masking.get_keras_mask
    set_mask = masking.set_keras_mask
except (ImportError, AttributeError) as error:
    raise ModelError(lacks("Keras", keras.version(), SEEN, str(error))) from error

__all__ = [
    "HOOKS",
    "NOT_STATE",
    "RATE",
    "RESULTS",
    "SEEN",
    "SYMBOLIC_BUILD",
    "FitIterator",
    "accumulated_gradients",
    "are_arrays",
    "assign_moving_averages",
    "batch_specs",
    "build_symbolically",
    "check",
    "check_no_targets",
    "class_sample_weights",
    "class_weight_map",
    "clear_losses",
    "column",
    "compiled_loss",
    "compute_loss",
    "default_batch_size",
    "flat_losses",
    "flatten_layers",
    "gather",
    "get_mask",
    "global_generator",
    "has_training_argument",
    "has_weight_decay",
    "host_array",
    "initial_epoch",
    "is_grain_dataset",
    "is_tf_dataset",
    "is_torch_dataloader",
    "iterations_of",
    "learning_rate_of",
    "length_of_dataloader",
    "loss_tracker",
    "make_global_generator",
    "moving_averages",
    "nested_metrics",
    "output_spec",
    "own_losses",
    "own_non_trainable_variables",
    "own_trainable_variables",
    "pack_arrays",
    "reduction_axes",
    "register_as",
    "replace_moments",
    "scaling_losses",
    "seed_generators_of",
    "set_global_generator",
    "set_initial_epoch",
    "set_mask",
    "set_steps_seen",
    "set_untracked",
    "split_validation",
    "update_moving_averages",
    "warn_of_interruption",
]

# What hvdtrain overrides, or calls on objects of these classes.
HOOKS: dict[type, tuple[str, ...]] = {
    keras.Model: (
        "_clear_losses",
        "_compute_loss",
        "_flatten_layers",
        "_get_metrics_result_or_logs",
        "_get_own_losses",
        "_maybe_symbolic_build",
        "_symbolic_build",
    ),
    keras.layers.BatchNormalization: ("_moments",),
    keras.optimizers.Optimizer: (
        "_all_reduce_sum_gradients",
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_backend_update_step",
        "_clip_gradients",
        "_filter_empty_gradients",
        "_get_current_learning_rate",
        "_overwrite_model_variables_with_average_value",
        "_overwrite_variable_with_gradient",
        "_overwrite_variables_directly_with_gradients",
        "_update_model_variables_moving_average",
        "_use_weight_decay",
    ),
    TFEpochIterator: ("_enumerate_iterator", "_interrupted_warning"),
}

# What a compiled model and a built optimizer hold.
_OF_A_MODEL = ("_call_has_training_arg", "_compile_loss", "_initial_epoch", "_loss_tracker")
_OF_AN_OPTIMIZER = ("_iterations", "_learning_rate", "_trainable_variables")
_AVERAGES = "_model_variables_moving_average"  # of one that is built, with use_ema

RESULTS = "_get_metrics_result_or_logs"
"""The method of a model that says what its loops report; takes what the last step returned."""
SYMBOLIC_BUILD = "_maybe_symbolic_build"
"""The method of a model to which ``fit`` shows its iterator, as ``iterator``."""
NOT_STATE = {"_trainable_variables", "_variables", "_accumulated_gradients"}
"""An optimizer's attributes beside state: the model's variables, a list of all, waiting sums."""
RATE = "_get_current_learning_rate"
"""The method of an optimizer that computes the learning rate of a step."""

FitIterator: type[Any] = TFEpochIterator
"""The class of the iterator that ``fit`` uses for the steps of its epochs."""


def check(model: keras.Model, optimizers: Sequence[Any]) -> None:
    """Check that this Keras has all that hvdtrain needs of it, given a compiled model.

    ``optimizers`` are the plain ones that it applies.

    Raises:
        ModelError: Something is missing; names it, and the versions of Keras that have it.
    """
    missing = missing_hooks(HOOKS)
    missing += [f"{type(model).__name__}.{n}" for n in _OF_A_MODEL if not hasattr(model, n)]
    for optimizer in optimizers:
        averages = getattr(optimizer, "built", False) and getattr(optimizer, "use_ema", False)
        names = (*_OF_AN_OPTIMIZER, _AVERAGES) if averages else _OF_AN_OPTIMIZER
        absent = [name for name in names if not hasattr(optimizer, name)]
        missing += [f"{type(optimizer).__name__}.{name}" for name in absent]
    if missing:
        raise ModelError(lacks("Keras", keras.version(), SEEN, ", ".join(missing)))


def _held(holder: Any, name: str) -> Any:
    """Return a private attribute.

    Raises:
        ModelError: The object has none of this name; names the versions of Keras that have it.
    """
    try:
        return getattr(holder, name)
    except AttributeError:
        missing = f"{type(holder).__name__}.{name}"
        raise ModelError(lacks("Keras", keras.version(), SEEN, missing)) from None


def set_untracked(holder: Any, name: str, value: Any) -> None:
    """Set an attribute past Keras' ``__setattr__``, which would make it part of what is saved."""
    object.__setattr__(holder, name, value)


# Models and layers.


def flatten_layers(model: keras.Model, *, include_self: bool = True) -> list[Any]:
    """All layers that a model or layer is made of."""
    return list(model._flatten_layers(include_self=include_self))


def own_trainable_variables(holder: Any) -> list[Any]:
    """The trainable variables of a layer or an optimizer itself, without those of its parts."""
    return list(_held(holder, "_trainable_variables"))


def own_non_trainable_variables(layer: Any) -> list[Any]:
    """The variables that a layer itself updates without gradients."""
    return list(_held(layer, "_non_trainable_variables"))


def own_losses(layer: Any) -> list[Any]:
    """Return the losses that ``add_loss`` of a layer was given, without those of its parts."""
    return list(layer._get_own_losses())


def clear_losses(model: keras.Model) -> None:
    """Forget what ``add_loss`` was given."""
    model._clear_losses()


def has_training_argument(model: keras.Model) -> bool:
    """Whether ``call`` of the model has an argument ``training``."""
    return bool(model._call_has_training_arg)


def compute_loss(model: keras.Model, **arguments: Any) -> Any:
    """The loss of a batch, as the step of the model computes it."""
    return model._compute_loss(**arguments)


def compiled_loss(model: keras.Model) -> Any:
    """Return what ``compile`` made of the losses."""
    return model._compile_loss


def flat_losses(model: keras.Model) -> list[Any]:
    """Return what ``compile`` made of each single loss; empty before it is built."""
    loss = compiled_loss(model)
    return [] if loss is None else list(_held(loss, "_flat_losses") or [])


@contextmanager
def scaling_losses(factor: Callable[[str | None, Any], Any]) -> Iterator[None]:
    """Within the block multiply what each Keras loss returns.

    Args:
        factor: Takes the loss's reduction, and what its mean is divided by the sum of: its mask, or
            its sample weights with ``mean_with_sample_weight``; None for a mean over all values.
            Returns a scalar, or None for 1.
    """

    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        reduced = _reduce_values(values, sample_weight, mask, reduction, dtype)
        counted = mask
        if reduction == "mean_with_sample_weight":
            counted = _apply_mask(sample_weight, mask, reduced.dtype, reduction)
        by = factor(reduction, counted)
        return reduced if by is None else reduced * tf.cast(by, reduced.dtype)

    loss_module.reduce_weighted_values = reduce
    try:
        yield
    finally:
        loss_module.reduce_weighted_values = _reduce_values


def loss_tracker(model: keras.Model) -> Any:
    """The metric ``loss``, or None."""
    return getattr(model, "_loss_tracker", None)


def nested_metrics(metric: Any) -> list[Any]:
    """Return the metrics that a metric is made of: what ``compile`` was given, for its own."""
    return list(getattr(metric, "metrics", None) or _held(metric, "_metrics"))


def build_symbolically(model: keras.Model, batch_spec: Any) -> None:
    """Build what ``compile`` made for batches of these specs."""
    model._symbolic_build(data_batch=batch_spec)


def output_spec(model: keras.Model, inputs: Any) -> Any:
    """Call the model with symbols, which builds it."""
    return compute_output_spec(model, inputs, training=False)


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch that ``fit`` begins with where its argument doesn't say; None for none."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Let ``fit`` begin with another epoch."""
    model._initial_epoch = epoch


def set_steps_seen(iterator: Any, steps: int) -> None:
    """Tell ``fit``'s iterator how many steps of the epoch are done."""
    _held(iterator, "_steps_seen")
    iterator._steps_seen = steps


def warn_of_interruption(iterator: Any) -> None:
    """Let ``fit``'s iterator warn that the data ended before the epoch."""
    iterator._interrupted_warning()


def seed_generators_of(layer: Any) -> list[Any]:
    """The random states of a layer itself."""
    return list(_held(layer, "_seed_generators"))


def register_as(made: type, plain: type) -> None:
    """Let a class made of ``plain`` be saved under the name by which that one is registered."""
    if plain in GLOBAL_CUSTOM_NAMES:
        GLOBAL_CUSTOM_NAMES[made] = GLOBAL_CUSTOM_NAMES[plain]


def replace_moments(layer: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let a BatchNormalization take other moments: what ``make`` makes of its class's method."""
    plain = functools.partial(type(layer)._moments, layer)
    set_untracked(layer, "_moments", make(plain))


def reduction_axes(layer: Any) -> list[int]:
    """The axes over which a BatchNormalization takes its moments."""
    return list(_held(layer, "_reduction_axes"))


# Optimizers.


def learning_rate_of(optimizer: Any) -> Any:
    """Return a plain optimizer's learning rate as it holds it: a variable, schedule or function."""
    return optimizer._learning_rate


def iterations_of(optimizer: Any) -> Any:
    """The variable in which a plain optimizer counts steps; unlike ``iterations`` not updates."""
    return optimizer._iterations


def accumulated_gradients(optimizer: Any) -> list[Any]:
    """The sums of gradients that wait for those of later steps; empty without them."""
    waits = optimizer.built and optimizer.gradient_accumulation_steps
    return list(_held(optimizer, "_accumulated_gradients")) if waits else []


def moving_averages(optimizer: Any) -> list[Any]:
    """The moving averages of its variables, of an optimizer that is built and has ``use_ema``."""
    return list(_held(optimizer, _AVERAGES))


def update_moving_averages(optimizer: Any, variables: Sequence[Any]) -> None:
    """Let an optimizer with ``use_ema`` take weights into their moving averages."""
    optimizer._update_model_variables_moving_average(variables)


def assign_moving_averages(optimizer: Any, variables: Sequence[Any]) -> None:
    """Give variables the moving averages of their weights."""
    optimizer._overwrite_model_variables_with_average_value(variables)


def has_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Whether weight decay is for this variable, too."""
    return bool(optimizer._use_weight_decay(variable))


# Random numbers.


def global_generator() -> Any:
    """The generator behind ``keras.random``; None before it was first used."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def set_global_generator(generator: Any) -> None:
    """Let ``keras.random`` draw from another generator; None: from one that Keras makes."""
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)


# What is given to ``fit``.


def are_arrays(*structures: Any) -> bool:
    """Whether Keras would treat these (nested, None allowed) as arrays held in memory."""
    return bool(can_convert_arrays(structures)) and any(
        leaf is not None for leaf in keras.tree.flatten(structures)
    )


def check_no_targets(kind: str, y: Any, sample_weight: Any) -> None:
    """Raise Keras' error if targets or weights stand beside an input that holds them itself."""
    if y is not None:
        data_adapters.raise_unsupported_arg("y", "the targets", kind)
    if sample_weight is not None:
        data_adapters.raise_unsupported_arg("sample_weights", "the sample weights", kind)


def default_batch_size(rows: int, steps: int | None, size: int) -> int:
    """Keras' choice where the user gave no batch size, per rank: 32, or to fit ``steps``."""
    return max(1, math.ceil(rows / (steps * size))) if steps else 32


def pack_arrays(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> tuple[Any, int]:
    """Check arrays as Keras does and turn class weights into sample weights.

    Returns:
        The batch that a step gets, but with all rows, lists made tuples; and the rows.

    Raises:
        ValueError: From Keras: different lengths, or weights that don't fit the targets.
    """
    if y is None and class_weight is not None:
        raise DataError("class_weight was given without targets: pass y, or leave it out.")
    adapter = ArrayDataAdapter(
        x, y, sample_weight=sample_weight, class_weight=class_weight, batch_size=1
    )
    inputs = keras.tree.lists_to_tuples(_held(adapter, "_inputs"))
    return inputs, int(_held(adapter, "_num_samples"))


def column(array: Any) -> Any:
    """One array as something that ``gather`` takes: cast to floatx, as tensors on the host."""
    converted = array_slicing.convert_to_sliceable(array, target_backend="tensorflow")
    if isinstance(converted, array_slicing.TensorflowSparseWrapper):
        return converted
    if data_adapter_utils.is_tensorflow_tensor(converted):
        return converted
    return tf.convert_to_tensor(converted)


def gather(column: Any, indices: Any) -> Any:
    """Rows of a ``column``, in the order of ``indices``; works inside a graph."""
    if isinstance(column, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(column, indices)
    return tf.gather(column, indices, axis=0)


def batch_specs(batches: list[Any]) -> list[tf.TypeSpec]:
    """Return the specs that several flat batches (lists of arrays) share, entry by entry."""
    merged = data_adapter_utils.get_tensor_spec([tuple(batch) for batch in batches])
    return list(merged)


def host_array(leaf: Any) -> Any:
    """Convert a torch tensor to a NumPy array, sparse data of SciPy and JAX to TensorFlow's."""
    if data_adapter_utils.is_torch_tensor(leaf):
        return leaf.detach().cpu().numpy()
    if data_adapter_utils.is_scipy_sparse(leaf):
        return tf.sparse.reorder(data_adapter_utils.scipy_sparse_to_tf_sparse(leaf))
    if data_adapter_utils.is_jax_sparse(leaf):
        return data_adapter_utils.jax_sparse_to_tf_sparse(leaf)
    return leaf


def length_of_dataloader(loader: Any) -> int | None:
    """Return the number of batches of a torch ``DataLoader``; None if unknown, or anything else."""
    if is_torch_dataloader(loader) and hasattr(loader.dataset, "__len__"):
        return len(loader)
    return None
