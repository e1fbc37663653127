"""The optimizer of a shard, and the checks whether an optimizer can be sharded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.errors import ModelError
from hvdtrain.private_api.keras import has_weight_decay, iterations_of, learning_rate_of

__all__ = [
    "accumulated_steps",
    "check_optimizer",
    "is_elementwise",
    "optimizer_for_pieces",
    "plain_optimizer",
    "unsplittable_variables",
]

# In these an element's update depends only on its own gradient, value and state, and on the step,
# and no gradient is kept. Subclasses may do anything.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta",
                "Ftrl", "Lion")  # fmt: skip


class _ShardOptimizer:
    """A mixin whose learning rate schedule counts the workers' steps.

    It also skips the code with which Keras wraps gradients for tf.distribute, because TensorFlow
    would keep every traced step and its variables forever.
    """

    _hvdtrain_steps = 1

    def _get_current_learning_rate(self) -> Any:
        schedule = learning_rate_of(self)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            # Keras' schedules also count steps that only accumulate gradients.
            steps = self._hvdtrain_steps
            return schedule(iterations_of(self) * steps + (steps - 1))
        return super()._get_current_learning_rate()  # type: ignore[misc]

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars


def check_optimizer(optimizer: Any, servers: int) -> None:
    """Raise ModelError if parameter servers can't apply gradients as ``optimizer`` would."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}; replace "
            "optimizers of tf_keras or keras.optimizers.legacy with those of keras.optimizers."
        )
    plain = plain_optimizer(optimizer)
    if isinstance(getattr(plain, "optimizers", None), (list, tuple)):
        raise ModelError(
            f"Parameter servers need a single optimizer, got {type(plain).__name__}, which has one "
            "for each group of variables. Compile the model with one optimizer, or train without "
            "parameter servers."
        )
    if plain.global_clipnorm and servers > 1:
        raise ModelError(
            f"global_clipnorm needs one parameter server, got {servers} (global_clipnorm="
            f"{plain.global_clipnorm}): none of them has all gradients. Use clipnorm or clipvalue, "
            "or one parameter server."
        )
    if plain.use_ema and (steps := plain.gradient_accumulation_steps):
        raise ModelError(
            "Parameter servers don't support use_ema=True with gradient_accumulation_steps, got "
            f"{steps}: Keras updates the averages in each step, and servers only in each update. "
            "Leave one of the two out, or --mode."
        )


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer itself, or the inner one of a ``LossScaleOptimizer``."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def accumulated_steps(optimizer: Any) -> int:
    """Return how many steps of a worker make one update."""
    return int(plain_optimizer(optimizer).gradient_accumulation_steps or 1)


def is_elementwise(optimizer: Any) -> bool:
    """Return whether each element is updated independently of others and of older gradients."""
    kind = type(plain_optimizer(optimizer))
    return kind in {getattr(keras.optimizers, name) for name in _ELEMENTWISE}


def unsplittable_variables(optimizer: Any, variables: Sequence[Any]) -> set[int]:
    """Return the numbers of the variables that must be on one server as a whole.

    Their updates use more than one element: with optimizers that are not elementwise, with
    ``clipnorm``, and with a constraint.
    """
    if not is_elementwise(optimizer) or plain_optimizer(optimizer).clipnorm:
        return set(range(len(variables)))
    return {i for i, variable in enumerate(variables) if variable.constraint is not None}


def optimizer_for_pieces(optimizer: Any, pieces: Sequence[Any], wholes: Sequence[Any]) -> Any:
    """Return a copy of ``optimizer``, built on ``pieces`` of the variables ``wholes``.

    It expects gradients that are already accumulated and unscaled.

    Raises:
        ModelError: It can't be created from its configuration.
    """
    plain = plain_optimizer(optimizer)
    kind = type(plain)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own_kind: Any = type(kind.__name__, (_ShardOptimizer, kind), names)
    try:
        with warnings.catch_warnings():
            # A function that gives the learning rate is passed on without serialization below.
            warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
            config = plain.get_config()
        for done_before in ("gradient_accumulation_steps", "loss_scale_factor"):
            if done_before in config:
                config[done_before] = None
        if not isinstance(learning_rate_of(plain), keras.Variable):
            config["learning_rate"] = learning_rate_of(plain)
        own = own_kind.from_config(config)
    except Exception as error:
        raise ModelError(
            f"A parameter server could not create its {kind.__name__}: expected get_config() to "
            f"have the arguments of its constructor, got {error!r}. Complete its get_config()."
        ) from error
    object.__setattr__(own, "_hvdtrain_steps", accumulated_steps(optimizer))
    # The configuration doesn't have exclusions, which depend on variables and their names.
    excluded = [p for p, whole in zip(pieces, wholes) if not has_weight_decay(plain, whole.value)]
    if excluded:
        own.exclude_from_weight_decay(var_list=excluded)
    own.build(list(pieces))
    return own
