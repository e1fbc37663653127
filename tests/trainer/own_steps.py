"""Custom train steps for each backend of Keras.

A step of a class with ``own_steps`` has the signature that TensorFlow and torch share, and calls
``minimize``. For JAX, the step runs in a ``StatelessScope``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

__all__ = ["OwnStep", "differentiate", "minimize", "own_steps", "track_optimizer"]

_ON_JAX = keras.backend.backend() == "jax"


def own_steps(kind: type[keras.Model]) -> type[keras.Model]:
    """Convert the steps of a class to the signature of the backend."""
    for name in ("train_step", "test_step", "predict_step"):
        if _ON_JAX and name in vars(kind):
            setattr(kind, name, _stateless(vars(kind)[name]))
    return kind


def _stateless(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def run(self: keras.Model, state: Any, data: Any) -> Any:
        groups = _state_variables(self, len(state))
        pairs = [
            pair for variables, values in zip(groups, state) for pair in zip(variables, values)
        ]
        with keras.StatelessScope(state_mapping=pairs) as scope:
            logs = keras.tree.map_structure(_value, step(self, data))
        new = tuple([_current(scope, variable) for variable in group] for group in groups)
        # A predict step returns only the variables that can change.
        return logs, new[1] if len(new) == 2 else new

    return run


def _state_variables(model: keras.Model, count: int) -> list[list[Any]]:
    """Return the variables in the order of the state of Keras' JAX trainer."""
    model_variables = [model.trainable_variables, model.non_trainable_variables]
    optimizer = [model.optimizer.variables] if count == 4 else []
    metrics = [model.metrics_variables] if count >= 3 else []
    return [*model_variables, *optimizer, *metrics]


def _current(scope: Any, variable: Any) -> Any:
    value = scope.get_current_value(variable)
    return variable.value if value is None else value


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, keras.Variable) else leaf


def track_optimizer(optimizer: Any, weights: Sequence[Any]) -> list[Any]:
    """Return what a model must have as an attribute if ``optimizer`` isn't its main optimizer.

    On JAX, these are the optimizer's variables, which Keras then includes in the state of a step.
    """
    if _ON_JAX:
        optimizer.build(weights)
    return [*optimizer.variables] if _ON_JAX else []


def minimize(
    model: keras.Model, optimizer: Any, weights: Sequence[Any], losses: Callable[[], Any]
) -> Any:
    """Update weights by the gradients of a loss, and return what ``losses`` returned.

    Args:
        model: The model that contains the weights.
        optimizer: The optimizer that is applied.
        weights: The variables to update.
        losses: Returns a tuple of the loss and other results.
    """
    results, gradients = differentiate(model, weights, losses)
    if not _ON_JAX:
        optimizer.apply(gradients, weights)
        return results
    # A LossScaleOptimizer can't be applied otherwise while JAX traces the step.
    if not optimizer.built:
        optimizer.build(weights)
    state = [variable.value for variable in optimizer.variables]
    values = [weight.value for weight in weights]
    new, state = optimizer.stateless_apply(state, gradients, values)
    for variable, value in zip([*weights, *optimizer.variables], [*new, *state], strict=True):
        variable.assign(value)
    return results


def differentiate(
    model: keras.Model, weights: Sequence[Any], losses: Callable[[], Any]
) -> tuple[Any, list[Any]]:
    """Return what ``losses`` returned, and the gradients of its first result."""
    return _DIFFERENTIATE[keras.backend.backend()](model, weights, losses)


def _differentiate_tensorflow(model: Any, weights: Any, losses: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        results = losses()
    return results, tape.gradient(results[0], weights)


def _differentiate_torch(model: Any, weights: Any, losses: Any) -> Any:
    model.zero_grad()
    results = losses()
    results[0].backward()
    return keras.tree.map_structure(_detached, results), [weight.value.grad for weight in weights]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if hasattr(leaf, "detach") else leaf


def _differentiate_jax(model: Any, weights: Any, losses: Any) -> Any:
    import jax

    others = [*model.non_trainable_variables, *model.metrics_variables]

    def loss_of(values: Any) -> Any:
        # The scope inside another scope must know the values of the outer one.
        pairs = [(variable, variable.value) for variable in model.variables]
        pairs += [(variable, variable.value) for variable in model.metrics_variables]
        with keras.StatelessScope(state_mapping=[*pairs, *zip(weights, values)]) as scope:
            results = losses()
        return results[0], (results, [_current(scope, variable) for variable in others])

    values = [weight.value for weight in weights]
    (_, (results, new)), gradients = jax.value_and_grad(loss_of, has_aux=True)(values)
    for variable, value in zip(others, new):
        variable.assign(value)
    return results, gradients


_DIFFERENTIATE = {
    "tensorflow": _differentiate_tensorflow,
    "torch": _differentiate_torch,
    "jax": _differentiate_jax,
}


def _step_tensorflow(model: Any, data: Any) -> Any:
    import tensorflow as tf

    x, y = data
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=y, y_pred=model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


def _step_torch(model: Any, data: Any) -> Any:
    import torch

    x, y = data
    model.zero_grad()
    loss = model.compute_loss(y=y, y_pred=model(x, training=True))
    loss.backward()
    weights = model.trainable_weights[:]
    with torch.no_grad():
        model.optimizer.apply([weight.value.grad for weight in weights], weights)
    return {"loss": loss}


def _step_jax(model: Any, state: Any, data: Any) -> Any:
    import jax

    trainable, non_trainable, optimizer, metrics = state
    x, y = data

    def loss_and_updates(trainable: Any, non_trainable: Any) -> Any:
        y_pred, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return model.compute_loss(x, y, y_pred), non_trainable

    differentiate = jax.value_and_grad(loss_and_updates, has_aux=True)
    (loss, non_trainable), gradients = differentiate(trainable, non_trainable)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return {"loss": loss}, (trainable, non_trainable, optimizer, metrics)


class OwnStep(keras.Model):
    """A subclassed model with the step of its backend in Keras' guides."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    train_step = {"tensorflow": _step_tensorflow, "torch": _step_torch, "jax": _step_jax}[
        keras.backend.backend()
    ]
