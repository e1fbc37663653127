"""Detection of metrics whose variables must not be summed over ranks, such as a maximum.

Ranks combine a metric by summing its variables. The sum is correct only if each update adds values
that don't depend on the variables, and if a reset sets the variables to zero. Metrics don't declare
whether this is true. Metrics that Keras does not define are therefore tested on the first batches.
The test sets the metric's variables to zero, and updates the metric twice with the same batch. The
second update must add what the first one added.
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
from hvdtrain.private_api.keras import nested_metrics, set_untracked
from hvdtrain.trainer.joint_results import reduction_of_metric

__all__ = ["AdditiveMetrics", "adds_up"]

_BATCHES = 10  # more than one, because a batch whose values are all zero proves nothing


class AdditiveMetrics:
    """Tests whether the custom metrics of a model, which Keras does not define, are additive."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # Maps the id of a metric to the metric and the number of batches that are left to test, or
        # -1 if the metric is not additive.
        self._tested: dict[int, tuple[Any, Any]] = {}

    def reset(self) -> None:
        """Reset the tested metrics.

        A metric whose variables are not zero after the reset is marked as not additive.
        """
        for metric, left in self._left():
            metric.reset_state()
            if any(_as_float64(variable).numpy().any() for variable in _summed(metric)):
                left.assign(-1.0)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Test each metric that the body of the ``with`` block updates."""
        tested = self._left()
        for metric, left in tested:
            set_untracked(metric, "update_state", _testing(metric, left))
        try:
            yield
        finally:
            for metric, _ in tested:
                object.__delattr__(metric, "update_state")

    def check(self, collectives: Engine) -> None:
        """Check that all tested metrics are additive on all ranks. All ranks must call this.

        Raises:
            ModelError: If a metric is not additive on some rank. All ranks raise this error.
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
                "update_state must add values that depend only on the batch to the metric's "
                "variables, and reset_state must set the variables to zero. Keep sums in the "
                "variables, such as a total and a count, and compute the result from them in "
                "result(). Or leave the metric out of the model, and compute it from the result of "
                "model.predict(…)."
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
    """Yield the metrics that Keras does not define, including those inside Keras' own metrics."""
    for metric in metrics:
        if type(metric).__module__.split(".")[0] != "keras":
            yield metric
        else:
            yield from _users_metrics(nested_metrics(metric))


def _testing(metric: Any, left: Any) -> Any:
    """Return a replacement for ``update_state`` that tests the metric before each update."""
    plain = metric.update_state

    def update_state(*args: Any, **options: Any) -> Any:
        # The test runs first, so that the actual update sets the metric's other attributes last.
        def test() -> None:
            additive = adds_up(metric, plain, args, options)
            left.assign(tf.where(additive, left.value - 1.0, -1.0))

        tf.cond(left.value > 0, test, lambda: None)
        return plain(*args, **options)

    return update_state


def adds_up(metric: Any, update: Any, args: Sequence[Any], options: Mapping[str, Any]) -> tf.Tensor:
    """Return whether an update of a metric adds values that don't depend on the metric's state.

    The state is restored afterwards. Non-finite values are ignored.
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
