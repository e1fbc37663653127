"""Optimizers for shards of variables: which ones can do it, and the one that a shard gets."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.errors import ModelError
from hvdtrain.private_api.keras import decays, iterations_of, rate_of

__all__ = [
    "accumulated_steps",
    "check_optimizer",
    "is_elementwise",
    "optimizer_for_pieces",
    "plain_optimizer",
    "stays_whole",
]

# Of these it is known that an element's update depends on nothing but its own gradient, value
# and state, and on the step, and that no gradient is kept. Subclasses may do anything.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta",
                "Ftrl", "Lion")  # fmt: skip


class _AppliesAlone:
    """A mixin for a shard's optimizer: its schedule counts the workers' steps.

    It also skips the code with which Keras wraps gradients for tf.distribute: TensorFlow would
    keep every traced step, with its variables, forever.
    """

    _hvdtrain_steps = 1

    def _get_current_learning_rate(self) -> Any:
        schedule = rate_of(self)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            # Keras' schedules count the steps whose gradients are accumulated, too.
            steps = self._hvdtrain_steps
            return schedule(iterations_of(self) * steps + (steps - 1))
        return super()._get_current_learning_rate()  # type: ignore[misc]

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars


def check_optimizer(optimizer: Any, servers: int) -> None:
    """Raise ModelError unless parameter servers can apply gradients as ``optimizer`` would."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"Expected a Keras 3 optimizer, received {type(optimizer).__name__}. Optimizers of "
            "tf_keras or keras.optimizers.legacy must be replaced by those of keras.optimizers."
        )
    plain = plain_optimizer(optimizer)
    if isinstance(getattr(plain, "optimizers", None), (list, tuple)):
        raise ModelError(
            f"Received {type(plain).__name__}, which has an optimizer for each group of "
            "variables; parameter servers expected a single one. Compile the model with one "
            "optimizer, or train without parameter servers."
        )
    if plain.global_clipnorm and servers > 1:
        raise ModelError(
            f"Received global_clipnorm={plain.global_clipnorm} and {servers} parameter servers, "
            "none of which sees all gradients and so their norm. Use clipnorm or clipvalue, or "
            "one parameter server."
        )


def plain_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that updates variables; in a ``LossScaleOptimizer`` the inner one."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def accumulated_steps(optimizer: Any) -> int:
    """Returns how many steps of a worker make one update."""
    return int(plain_optimizer(optimizer).gradient_accumulation_steps or 1)


def is_elementwise(optimizer: Any) -> bool:
    """Returns whether elements are known to be updated without others, or older gradients."""
    kind = type(plain_optimizer(optimizer))
    return kind in {getattr(keras.optimizers, name) for name in _ELEMENTWISE}


def stays_whole(optimizer: Any, variables: Sequence[Any]) -> set[int]:
    """Returns the numbers of the variables of which one server must hold all.

    That is so where an update looks at more than one element: in optimizers that are not known to
    do otherwise, where each gradient is clipped by its norm, and under a constraint.
    """
    if not is_elementwise(optimizer) or plain_optimizer(optimizer).clipnorm:
        return set(range(len(variables)))
    return {i for i, variable in enumerate(variables) if variable.constraint is not None}


def optimizer_for_pieces(optimizer: Any, pieces: Sequence[Any], wholes: Sequence[Any]) -> Any:
    """Returns another optimizer like ``optimizer``, built on pieces of the variables ``wholes``.

    It has a state of its own, and takes gradients as they are: accumulating and unscaling is done
    before.

    Raises:
        ModelError: Its configuration doesn't tell how to make another.
    """
    plain = plain_optimizer(optimizer)
    kind = type(plain)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own_kind: Any = type(kind.__name__, (_AppliesAlone, kind), names)
    try:
        with warnings.catch_warnings():
            # The function that gives the learning rate is handed over as it is.
            warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
            config = plain.get_config()
        for done_before in ("gradient_accumulation_steps", "loss_scale_factor"):
            if done_before in config:
                config[done_before] = None
        if not isinstance(rate_of(plain), keras.Variable):
            # A schedule or a function keeps no state, and might not survive being serialized.
            config["learning_rate"] = rate_of(plain)
        own = own_kind.from_config(config)
    except Exception as error:
        raise ModelError(
            f"A parameter server could not make a {kind.__name__} of its own: expected "
            f"get_config() to hold what its constructor takes, received {error!r}. Complete its "
            "get_config()."
        ) from error
    object.__setattr__(own, "_hvdtrain_steps", accumulated_steps(optimizer))
    # What the configuration doesn't hold: it is told by the model's variables and their names.
    excluded = [p for p, whole in zip(pieces, wholes) if not decays(plain, whole.value)]
    if excluded:
        own.exclude_from_weight_decay(var_list=excluded)
    own.build(list(pieces))
    return own
