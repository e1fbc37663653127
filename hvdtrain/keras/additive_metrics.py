"""Detection of metrics whose variables must not be summed over ranks, such as a maximum.

Ranks combine metrics by summing their variables. This is correct if an update adds the same values
to any state, and a reset sets zeros. No metric declares whether it does, so metrics of the user's
are tested in the first batches: a metric is updated twice from zeros, and the second update must
add what the first one did. The test needs no other samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.keras.joint_results import reduction_of_metric
from hvdtrain.private_api.keras import nested_metrics, set_untracked

__all__ = ["AdditiveMetrics", "adds_up"]

_BATCHES = 10  # more than one, as a batch whose values are zero proves nothing


class AdditiveMetrics:
    """Tests the metrics of one model that are not Keras' own."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # By id, the metric and the number of batches left to test; -1 if it is not additive.
        self._tested: dict[int, tuple[Any, Any]] = {}

    def reset(self) -> None:
        """Reset the metrics, as Keras' loops do; one that is not zero then can't be summed."""
        for metric, left in self._left():
            metric.reset_state()
            if any(_as_float64(variable).numpy().any() for variable in _summed(metric)):
                left.assign(-1.0)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Test each metric that is updated within the block."""
        tested = self._left()
        for metric, left in tested:
            set_untracked(metric, "update_state", _testing(metric, left))
        try:
            yield
        finally:
            for metric, _ in tested:
                object.__delattr__(metric, "update_state")

    def check(self, collectives: Engine) -> None:
        """Check that no rank found a metric that is not additive; collective.

        Raises:
            ModelError: On all ranks; names the metrics.
        """
        tested = self._left()
        if collectives.size == 1 or not tested:
            return
        own = np.asarray([left.numpy() for _, left in tested])
        least = collectives.allreduce(own, "min", name="kinds of metrics")
        wrong = [metric for (metric, _), value in zip(tested, least) if value < 0]
        if wrong:
            names = ", ".join(f"{m.name!r} ({type(m).__name__})" for m in wrong)
            raise ModelError(
                f"The state of the metric {names} can't be combined over {collectives.size} ranks: "
                "update_state must add values to its variables that depend on the batch alone, and "
                "reset_state must set them to zero. Keep sums in them, such as a total and a "
                "count, and compute the result from these in result(); or leave the metric out of "
                "the model, and compute it from the result of model.predict(…)."
            )

    def _left(self) -> list[tuple[Any, Any]]:
        metrics = {id(metric): metric for metric in _users_metrics(self._model.metrics)}
        for key, metric in metrics.items():
            if key not in self._tested:
                with tf.init_scope():
                    left = keras.Variable(_BATCHES, dtype="float32", trainable=False, name="left")
                self._tested[key] = metric, left
        return [self._tested[key] for key in metrics]


def _users_metrics(metrics: Sequence[Any]) -> Iterator[Any]:
    """Yield the metrics whose classes are not Keras', including those within Keras' own."""
    for metric in metrics:
        if type(metric).__module__.split(".")[0] != "keras":
            yield metric
        else:
            yield from _users_metrics(nested_metrics(metric))


def _testing(metric: Any, left: Any) -> Any:
    """Return a metric's ``update_state`` that tests it before each update."""
    plain = metric.update_state

    def update_state(*args: Any, **options: Any) -> Any:
        # Before the actual update, which then sets the metric's other attributes.
        def test() -> None:
            additive = adds_up(metric, plain, args, options)
            left.assign(tf.where(additive, left.value - 1.0, -1.0))

        tf.cond(left.value > 0, test, lambda: None)
        return plain(*args, **options)

    return update_state


def adds_up(metric: Any, update: Any, args: Sequence[Any], options: Mapping[str, Any]) -> tf.Tensor:
    """Return whether an update adds the same to any state of a metric; the state is restored.

    Values that are not finite are accepted.
    """
    variables = _summed(metric)
    before = [tf.identity(variable.value) for variable in metric.variables]
    for variable in metric.variables:
        variable.assign(tf.zeros_like(variable.value))
    sums = []
    for _ in range(2):
        update(*args, **options)
        sums.append([tf.identity(_as_float64(variable)) for variable in variables])
    for variable, value in zip(metric.variables, before):
        variable.assign(value)
    differ = [
        tf.reduce_any(tf.abs(twice - 2 * once) > _tolerance(variable) * tf.abs(twice))
        for variable, once, twice in zip(variables, *sums)
    ]
    return tf.logical_not(tf.reduce_any(tf.stack([tf.constant(False), *differ])))


def _summed(metric: Any) -> list[Any]:
    return [v for v in metric.variables if reduction_of_metric(v) == "sum"]


def _as_float64(variable: Any) -> tf.Tensor:
    return tf.cast(variable.value, tf.float64)


def _tolerance(variable: Any) -> float:
    return {"float16": 1e-2, "bfloat16": 6e-2}.get(variable.dtype, 1e-5)
