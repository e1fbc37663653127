"""Detection of metrics whose variables must not be summed over ranks, such as a maximum.

Ranks combine a metric by summing its variables. The sum is correct only if each update adds values
that don't depend on the variables, and if a reset sets the variables to zero. Metrics don't declare
whether this is true. Metrics that Keras does not define are therefore tested on the first batches.
The test sets the metric's variables to zero, and updates the metric twice with the same batch. The
second update must add what the first one added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.frameworks import of_keras
from hvdtrain.private_api.keras import nested_metrics, set_untracked
from hvdtrain.trainer.joint_results import reduction_of_metric
from hvdtrain.trainer.step_variables import HostVariable, step_variable

__all__ = ["AdditiveMetrics", "adds_up"]

_BATCHES = 10  # more than one, because a batch whose values are all zero proves nothing
# JAX has no float64 by default.
_WIDE_FLOAT = "float32" if keras.backend.backend() == "jax" else "float64"


class AdditiveMetrics:
    """Tests whether the custom metrics of a model, which Keras does not define, are additive."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # Maps the id of a metric to the metric and the number of batches that are left to test, or
        # -1 if the metric is not additive.
        self._tested: dict[int, tuple[Any, Any]] = {}

    def reset(self) -> None:
        """Reset the tested metrics. One that is not zero afterwards is marked as not additive."""
        for metric, left in self._left():
            metric.reset_state()
            if any(np.any(variable.numpy()) for variable in _summed(metric)):
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
                self._tested[key] = metric, step_variable(_BATCHES, dtype="float32", name="left")
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
    count = _on_host if isinstance(left, HostVariable) else _in_graph
    tests, note = count(left)

    def update_state(*args: Any, **options: Any) -> Any:
        # The test runs first, so that the actual update sets the metric's other attributes last.
        ops.cond(tests(), lambda: note(adds_up(metric, plain, args, options)), lambda: None)
        return plain(*args, **options)

    return update_state


def _in_graph(left: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return functions of a step that read and update the number of batches left to test."""

    def note(additive: Any) -> None:
        left.assign(ops.where(additive, left.value - 1.0, -1.0))

    return lambda: left.value > 0, note


def _on_host(left: HostVariable) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return the functions of ``_in_graph`` for a number in host memory."""
    run_on_host = of_keras().run_on_host

    def note(additive: Any) -> None:
        def update(additive: np.ndarray) -> Sequence[np.ndarray]:
            left.assign(left.value - 1.0 if additive else -1.0)
            return []

        run_on_host(update, [additive], [])

    def tests() -> Any:
        return run_on_host(lambda: [np.asarray(left.value > 0)], [], [()], ["bool"])[0]

    return tests, note


def adds_up(metric: Any, update: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return whether an update of a metric adds values that don't depend on the metric's state.

    The result is a scalar tensor. The state is restored afterwards. Non-finite values are ignored.
    """
    variables = _summed(metric)
    before = [_snapshot(variable) for variable in metric.variables]
    for variable in metric.variables:
        variable.assign(ops.zeros_like(variable.value))
    sums = []
    for _ in range(2):
        update(*args, **options)
        sums.append([ops.cast(_snapshot(variable), _WIDE_FLOAT) for variable in variables])
    for variable, value in zip(metric.variables, before):
        variable.assign(value)
    additive = ops.convert_to_tensor(True)
    for variable, once, twice in zip(variables, *sums):
        differs = ops.abs(twice - 2 * once) > _tolerance(variable) * ops.abs(twice)
        additive = ops.logical_and(additive, ops.logical_not(ops.any(differs)))
    return additive


def _snapshot(variable: Any) -> Any:
    """Return the value of a variable, which later assignments don't change."""
    # JAX never changes arrays. A copy within a branch of ops.cond must not leave the branch.
    return variable.value if keras.backend.backend() == "jax" else ops.copy(variable.value)


def _summed(metric: Any) -> list[Any]:
    return [v for v in metric.variables if reduction_of_metric(v) == "sum"]


def _tolerance(variable: Any) -> float:
    return {"float16": 1e-2, "bfloat16": 6e-2}.get(variable.dtype, 1e-5)
