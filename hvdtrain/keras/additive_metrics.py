"""Find metrics whose variables may not be added up over ranks, such as one that keeps a maximum.

Ranks join their metrics by adding the variables up, which is right if an update adds the same to
any state, and a reset leaves zeros. Nobody declares it, so it is tried out: in the first batches a
metric of the user's own is updated twice from zeros, and the second update must add what the first
one did. That needs no samples but those of the batch, and holds wherever the metric is updated.
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
from hvdtrain.private_api.keras import parts_of_metric, set_untracked

__all__ = ["AdditiveMetrics", "adds_up"]

_BATCHES = 10  # Batches that are tried; a batch whose values are zero shows nothing.


class AdditiveMetrics:
    """Tries out the metrics of one model that are not Keras' own."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # By id: the metric, and how many batches are left to be tried; -1 if it doesn't add up.
        self._tried: dict[int, tuple[Any, Any]] = {}

    def reset(self) -> None:
        """Reset the metrics, as Keras' loops do; what is then not zero can't be added up."""
        for metric, left in self._left():
            metric.reset_state()
            if any(_sums_of(variable).numpy().any() for variable in _summed(metric)):
                left.assign(-1.0)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Within the block try out each metric as it is updated."""
        tried = self._left()
        for metric, left in tried:
            set_untracked(metric, "update_state", _trying(metric, left))
        try:
            yield
        finally:
            for metric, _ in tried:
                object.__delattr__(metric, "update_state")

    def check(self, collectives: Engine) -> None:
        """Check that the metrics may be added up; collective.

        Raises:
            ModelError: On all ranks, if one of them found a metric that may not.
        """
        tried = self._left()
        if collectives.size == 1 or not tried:
            return
        own = np.asarray([left.numpy() for _, left in tried])
        least = collectives.allreduce(own, "min", name="kinds of metrics")
        wrong = [metric for (metric, _), value in zip(tried, least) if value < 0]
        if wrong:
            names = ", ".join(f"{m.name!r} ({type(m).__name__})" for m in wrong)
            raise ModelError(
                f"The state of the metric {names} can't be joined over {collectives.size} ranks: "
                "update_state must add to its variables what depends on the batch alone, and "
                "reset_state must set them to zero. Keep sums in them, such as a total and a "
                "count, and compute the result from these in result(); or leave the metric out of "
                "the model, and compute it from what model.predict(…) returns."
            )

    def _left(self) -> list[tuple[Any, Any]]:
        metrics = {id(metric): metric for metric in _own_metrics(self._model.metrics)}
        for key, metric in metrics.items():
            if key not in self._tried:
                with tf.init_scope():
                    left = keras.Variable(_BATCHES, dtype="float32", trainable=False, name="left")
                self._tried[key] = metric, left
        return [self._tried[key] for key in metrics]


def _own_metrics(metrics: Sequence[Any]) -> Iterator[Any]:
    """Return the metrics, and those within Keras' own, whose classes are not Keras'."""
    for metric in metrics:
        if type(metric).__module__.split(".")[0] != "keras":
            yield metric
        else:
            yield from _own_metrics(parts_of_metric(metric))


def _trying(metric: Any, left: Any) -> Any:
    """Return the ``update_state`` of a metric, which tries it out before it is updated."""
    plain = metric.update_state

    def update_state(*args: Any, **options: Any) -> Any:
        # First what is tried, so that the metric's attributes are left by the update that counts.
        def attempt() -> None:
            right = adds_up(metric, plain, args, options)
            left.assign(tf.where(right, left.value - 1.0, -1.0))

        tf.cond(left.value > 0, attempt, lambda: None)
        return plain(*args, **options)

    return update_state


def adds_up(metric: Any, update: Any, args: Sequence[Any], options: Mapping[str, Any]) -> tf.Tensor:
    """Return whether an update of a metric adds to a state what it adds to zeros.

    Values that are not finite show nothing. The metric's state is left as it was.
    """
    variables = _summed(metric)
    before = [tf.identity(variable.value) for variable in metric.variables]
    for variable in metric.variables:
        variable.assign(tf.zeros_like(variable.value))
    seen = []
    for _ in range(2):
        update(*args, **options)
        seen.append([tf.identity(_sums_of(variable)) for variable in variables])
    for variable, value in zip(metric.variables, before):
        variable.assign(value)
    differ = [
        tf.reduce_any(tf.abs(twice - 2 * once) > _tolerance(variable) * tf.abs(twice))
        for variable, once, twice in zip(variables, *seen)
    ]
    return tf.logical_not(tf.reduce_any(tf.stack([tf.constant(False), *differ])))


def _summed(metric: Any) -> list[Any]:
    """Return the variables that ranks add up."""
    return [v for v in metric.variables if reduction_of_metric(v) == "sum"]


def _sums_of(variable: Any) -> tf.Tensor:
    return tf.cast(variable.value, tf.float64)


def _tolerance(variable: Any) -> float:
    return {"float16": 1e-2, "bfloat16": 6e-2}.get(variable.dtype, 1e-5)
