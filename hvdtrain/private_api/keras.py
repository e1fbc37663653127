"""Private API of Keras for models, layers, losses, optimizers and random numbers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from hvdtrain.errors import ModelError
from hvdtrain.private_api import PrivateApi

# All tests pass with the newest version, and `make test-keras` with the oldest.
KERAS = PrivateApi(
    library="Keras", version=keras.version(), tested=("3.14", "3.15"), error=ModelError
)

try:
    from keras.src.backend import compute_output_spec
    from keras.src.backend.common import global_state, masking
    from keras.src.losses import loss as loss_module
    from keras.src.random import seed_generator
    from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
    from keras.src.trainers.epoch_iterator import EpochIterator
    from keras.src.utils.module_utils import tensorflow as lazy_tensorflow

    _reduce_values, _apply_mask = loss_module.reduce_weighted_values, loss_module.apply_mask
    # Returns the generator of keras.random, and creates it on first use.
    make_global_generator = seed_generator.global_seed_generator
    # The mask that a layer attaches to its output, or None.
    get_mask = masking.get_keras_mask
    set_mask = masking.set_keras_mask
except (ImportError, AttributeError) as error:
    raise KERAS.missing(error) from error

__all__ = [
    "BUILDS_IN_STEPS",
    "HOOKS",
    "KERAS",
    "NOT_STATE",
    "RATE",
    "RESULTS",
    "SYMBOLIC_BUILD",
    "accumulated_gradients",
    "accumulators_of",
    "assign_moving_averages",
    "build_symbolically",
    "check",
    "clear_losses",
    "compiled_loss",
    "compute_loss",
    "flat_losses",
    "flatten_layers",
    "get_mask",
    "global_generator",
    "has_training_argument",
    "has_weight_decay",
    "initial_epoch",
    "iterations_of",
    "keep_state",
    "learning_rate_of",
    "loop_over_steps",
    "loss_tracker",
    "make_global_generator",
    "moving_averages",
    "nested_metrics",
    "output_spec",
    "own_losses",
    "own_non_trainable_variables",
    "own_trainable_variables",
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
    "update_moving_averages",
    "warn_of_interruption",
    "without_loading_tensorflow",
]

_IN_TENSORFLOW = keras.backend.backend() == "tensorflow"

BUILDS_IN_STEPS = _IN_TENSORFLOW
"""Whether ``fit`` leaves it to the first step to build losses, metrics and unbuilt models."""
SYMBOLIC_BUILD = "_maybe_symbolic_build" if _IN_TENSORFLOW else "_symbolic_build"
"""Name of the model's method that ``fit`` calls with the argument ``iterator``."""

# The attributes of classes that hvdtrain overrides or calls.
HOOKS: dict[type, tuple[str, ...]] = {
    keras.Model: (
        "_clear_losses",
        "_compute_loss",
        "_flatten_layers",
        "_get_metrics_result_or_logs",
        "_get_own_losses",
        *dict.fromkeys((SYMBOLIC_BUILD, "_symbolic_build")),
    ),
    keras.layers.BatchNormalization: ("_moments",),
    keras.optimizers.Optimizer: (
        *(["_all_reduce_sum_gradients"] if _IN_TENSORFLOW else []),
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_backend_update_step",
        "_clip_gradients",
        "_filter_empty_gradients",
        "_get_current_learning_rate",
        "_get_variable_index",
        "_overwrite_model_variables_with_average_value",
        "_overwrite_variable_with_gradient",
        "_overwrite_variables_directly_with_gradients",
        "_update_model_variables_moving_average",
        "_use_weight_decay",
    ),
    keras.optimizers.LossScaleOptimizer: ("_stateful_handle_finite_grads",),
    EpochIterator: ("_enumerate_iterator", "_interrupted_warning"),
}

# The attributes of a compiled model, of an optimizer, and of a built optimizer with use_ema.
_OF_A_MODEL = ("_call_has_training_arg", "_compile_loss", "_initial_epoch", "_loss_tracker")
_OF_AN_OPTIMIZER = ("_iterations", "_learning_rate", "_trainable_variables")
_AVERAGES = "_model_variables_moving_average"

RESULTS = "_get_metrics_result_or_logs"
"""Name of the model's method that computes the results of ``fit`` from the last step's logs."""
NOT_STATE = {"_trainable_variables", "_variables", "_accumulated_gradients"}
"""Names of an optimizer's attributes with variables that are not part of its state."""
RATE = "_get_current_learning_rate"
"""Name of the optimizer's method that computes the learning rate of a step."""


def check(model: keras.Model, optimizers: Sequence[Any]) -> None:
    """Check that Keras has the private API that hvdtrain needs.

    ``optimizers`` are the plain optimizers of the model.

    Raises:
        ModelError: If Keras lacks a part of this API.
    """
    KERAS.check(HOOKS)
    KERAS.check({model: _OF_A_MODEL})
    for optimizer in optimizers:
        has_averages = getattr(optimizer, "built", False) and getattr(optimizer, "use_ema", False)
        names = (*_OF_AN_OPTIMIZER, _AVERAGES) if has_averages else _OF_AN_OPTIMIZER
        KERAS.check({optimizer: names})


def set_untracked(holder: Any, name: str, value: Any) -> None:
    """Set an attribute of a Keras object. Keras doesn't track its value, and doesn't save it."""
    object.__setattr__(holder, name, value)


# Models and layers.


def flatten_layers(model: keras.Model, *, include_self: bool = True) -> list[Any]:
    """Return all layers inside a model or layer, with itself unless ``include_self=False``."""
    return list(model._flatten_layers(include_self=include_self))


def own_trainable_variables(holder: Any) -> list[Any]:
    """Return the trainable variables of a layer or optimizer, without those of nested layers."""
    return list(KERAS.get(holder, "_trainable_variables"))


def own_non_trainable_variables(layer: Any) -> list[Any]:
    """Return the non-trainable variables of a layer, without those of nested layers."""
    return list(KERAS.get(layer, "_non_trainable_variables"))


def own_losses(layer: Any) -> list[Any]:
    """Return the losses passed to ``add_loss`` of a layer, without those of nested layers."""
    return list(layer._get_own_losses())


def clear_losses(model: keras.Model) -> None:
    """Remove the losses that were passed to ``add_loss`` of the model and its layers."""
    model._clear_losses()


def has_training_argument(model: keras.Model) -> bool:
    """Return whether the model's ``call`` has an argument ``training``."""
    return bool(model._call_has_training_arg)


def compute_loss(model: keras.Model, **arguments: Any) -> Any:
    """Compute the loss of a batch like the train step of Keras."""
    return model._compute_loss(**arguments)


def compiled_loss(model: keras.Model) -> Any:
    """Return the compiled loss of a model, or None if the model has no loss."""
    return model._compile_loss


def flat_losses(model: keras.Model) -> list[Any]:
    """Return the individual losses of the compiled loss; empty before they are built."""
    loss = compiled_loss(model)
    return [] if loss is None else list(KERAS.get(loss, "_flat_losses") or [])


@contextmanager
def scaling_losses(factor: Callable[[str | None, Any], Any]) -> Iterator[None]:
    """Multiply the result of each Keras loss that is computed in the ``with`` block by a factor.

    Args:
        factor: Function that returns the factor, or None to leave the result as it is. The first
            argument is the reduction of the loss, such as ``"sum"``. The second argument is the
            array whose sum is the divisor if the loss is a mean: the mask, the sample weights for
            ``mean_with_sample_weight``, or None.
    """

    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        reduced = _reduce_values(values, sample_weight, mask, reduction, dtype)
        divisor = mask
        if reduction == "mean_with_sample_weight":
            # On torch, Keras multiplies the sample weights by the mask in place.
            weight = None if sample_weight is None else keras.ops.copy(sample_weight)
            divisor = _apply_mask(weight, mask, reduced.dtype, reduction)
        scale = factor(reduction, divisor)
        return reduced if scale is None else reduced * keras.ops.cast(scale, reduced.dtype)

    loss_module.reduce_weighted_values = reduce
    try:
        yield
    finally:
        loss_module.reduce_weighted_values = _reduce_values


def loss_tracker(model: keras.Model) -> Any:
    """Return the metric ``loss`` of a model, or None if the model has no such metric."""
    return getattr(model, "_loss_tracker", None)


def loop_over_steps(model: keras.Model, step: Any, *, concatenate: bool = False) -> Any:
    """Return the function of JAX' trainer that runs a block of ``steps_per_execution`` steps.

    Args:
        model: Compiled model.
        step: Function that takes a state and an entry of the input, and returns a result and the
            new state.
        concatenate: Whether to concatenate the results of the steps. Otherwise the last one counts.
    """
    return model._make_function(step, concatenate_outputs=concatenate)


def keep_state(model: keras.Model, state: Sequence[Sequence[Any]]) -> None:
    """Set the state that ``jax_state_sync`` of JAX' trainer assigns to the variables of a model.

    ``state`` is the state of a training, test or prediction step.
    """
    kinds = ["trainable", "non_trainable", "optimizer", "metrics"]
    if len(state) < 4:
        kinds.remove("optimizer")
    named = {f"{kind}_variables": values for kind, values in zip(kinds, state)}
    set_untracked(model, "_jax_state", named)


def nested_metrics(metric: Any) -> list[Any]:
    """Return the metrics that a compiled or composite metric contains."""
    return list(getattr(metric, "metrics", None) or KERAS.get(metric, "_metrics"))


def build_symbolically(model: keras.Model, batch_spec: Any) -> None:
    """Build the compiled metrics and loss for batches with these shapes and dtypes."""
    model._symbolic_build(data_batch=batch_spec)


def output_spec(model: keras.Model, inputs: Any) -> Any:
    """Build a model by calling it with symbolic inputs, and return the spec of its outputs."""
    return compute_output_spec(model, inputs, training=False)


def initial_epoch(model: keras.Model) -> Any:
    """Return the epoch at which ``fit`` starts by default, or None if unset."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Set the epoch at which ``fit`` starts by default."""
    model._initial_epoch = epoch


def set_steps_seen(iterator: Any, steps: int) -> None:
    """Set the number of steps that the iterator of ``fit`` has completed."""
    KERAS.get(iterator, "_steps_seen")
    iterator._steps_seen = steps


def warn_of_interruption(iterator: Any) -> None:
    """Warn, like Keras, that the data ended before the epoch was complete."""
    iterator._interrupted_warning()


def seed_generators_of(layer: Any) -> list[Any]:
    """Return the seed generators of a layer, without those of nested layers."""
    return list(KERAS.get(layer, "_seed_generators"))


def register_as(derived: type, plain: type) -> None:
    """Make Keras save instances of ``derived`` under the name of the class ``plain``."""
    if plain in GLOBAL_CUSTOM_NAMES:
        GLOBAL_CUSTOM_NAMES[derived] = GLOBAL_CUSTOM_NAMES[plain]


def replace_moments(layer: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the moments method of a BatchNormalization layer by ``make(original)``."""
    plain = functools.partial(type(layer)._moments, layer)
    set_untracked(layer, "_moments", make(plain))


def reduction_axes(layer: Any) -> list[int]:
    """Return the axes over which a BatchNormalization layer computes its mean and variance."""
    return list(KERAS.get(layer, "_reduction_axes"))


# Optimizers.


def learning_rate_of(optimizer: Any) -> Any:
    """Return an optimizer's learning rate, which may be a variable, schedule or function."""
    return optimizer._learning_rate


def iterations_of(optimizer: Any) -> Any:
    """Return the variable in which an optimizer counts steps.

    With gradient accumulation, this count differs from ``iterations``, which counts updates.
    """
    return optimizer._iterations


def accumulated_gradients(optimizer: Any) -> list[Any]:
    """Return the variables that hold accumulated gradients; empty without accumulation."""
    accumulates = optimizer.built and optimizer.gradient_accumulation_steps
    return list(KERAS.get(optimizer, "_accumulated_gradients")) if accumulates else []


def accumulators_of(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the variable that holds each accumulated gradient of a built optimizer."""
    accumulators = KERAS.get(optimizer, "_accumulated_gradients")
    return [accumulators[optimizer._get_variable_index(variable)] for variable in variables]


def moving_averages(optimizer: Any) -> list[Any]:
    """Return the moving averages of the weights of a built optimizer with ``use_ema``."""
    return list(KERAS.get(optimizer, _AVERAGES))


def update_moving_averages(optimizer: Any, variables: Sequence[Any]) -> None:
    """Update the moving averages of the weights in an optimizer with ``use_ema``."""
    optimizer._update_model_variables_moving_average(variables)


def assign_moving_averages(optimizer: Any, variables: Sequence[Any]) -> None:
    """Set each variable to its moving average."""
    optimizer._overwrite_model_variables_with_average_value(variables)


def has_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Return whether an optimizer applies weight decay to a variable."""
    return bool(optimizer._use_weight_decay(variable))


# Random numbers.


def global_generator() -> Any:
    """Return the seed generator of ``keras.random``, or None before its first use."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def set_global_generator(generator: Any) -> None:
    """Set the seed generator of ``keras.random``. After None, Keras creates a new one."""
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)


@contextmanager
def without_loading_tensorflow() -> Iterator[None]:
    """Keep Keras from importing TensorFlow in the ``with`` block, unless it is already imported.

    With each backend, Keras imports TensorFlow if it is installed, only to recognize its types.
    """
    before = lazy_tensorflow._available
    if "tensorflow" not in sys.modules:
        lazy_tensorflow._available = False
    try:
        yield
    finally:
        lazy_tensorflow._available = before
