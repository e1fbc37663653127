"""Metrics that can be summed over ranks, and errors for other metrics."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.trainer.additive_metrics import adds_up
from tests.trainer.features import X, Y, classifier

ops = keras.ops


class OwnMetric(keras.metrics.Metric):
    initial = 0.0

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__(name="own")
        self.value = self.add_weight(shape=(3,), initializer="zeros", dtype=dtype, name="value")
        self.inner = keras.metrics.Mean()

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        value = ops.cast(ops.mean(ops.cast(p, "float32"), axis=0)[:3], self.value.dtype)
        self.value.assign(self.updated(ops.cast(self.value, self.value.dtype), value))
        self.inner.update_state(ops.abs(p))

    def result(self) -> Any:
        return ops.sum(ops.cast(self.value, "float32"))

    def reset_state(self) -> None:
        self.value.assign(ops.full((3,), self.initial, dtype=self.value.dtype))
        self.inner.reset_state()


def own(updated: Any, initial: float = 0.0) -> type[OwnMetric]:
    members = {"updated": staticmethod(updated), "initial": initial}
    return type("Own", (OwnMetric,), members)


Total = own(lambda value, new: value + new)
Difference = own(lambda value, new: value - 2 * new)
Largest = own(lambda value, new: ops.maximum(value, ops.abs(new)))
LargestOfAll = own(ops.maximum, -np.inf)
Last = own(lambda value, new: new)
Moving = own(lambda value, new: 0.99 * value + 0.01 * new)
Product = own(lambda value, new: value * ops.exp(new), 1.0)
Seen = own(lambda value, new: ops.cast(ops.logical_or(value > 0, ops.abs(new) > 0.0), value.dtype))

P = tf.nn.softmax(tf.constant(np.random.default_rng(1).normal(size=(12, 3)), tf.float32))


def tried(metric: keras.metrics.Metric, *args: Any) -> tuple[bool, bool]:
    """Return the results of ``adds_up``, eagerly and with XLA. Check that it restores the state."""
    metric.update_state(*args)
    before = [np.asarray(variable.numpy()) for variable in metric.variables]

    def attempt() -> tf.Tensor:
        return adds_up(metric, metric.update_state, args, {})

    results = bool(attempt()), bool(tf.function(attempt, jit_compile=True)())
    for variable, value in zip(metric.variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    return results


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_only_sums_and_means_are_additive(dtype):
    for made in (Total, Difference):
        assert tried(made(dtype), P, P) == (True, True)
    for made in (Largest, Last, Seen, *([Moving] if dtype == "float32" else [])):
        assert tried(made(dtype), P, P) == (False, False)


def test_metrics_within_a_metric_are_tested():
    outer = Total()
    outer.inner = Largest()
    outer.inner.update_state = lambda p: OwnMetric.update_state(outer.inner, p, p)
    assert tried(outer, P, P) == (False, False)


BUILT_IN = {
    "AUC": {},
    "FBetaScore": {"average": "macro"},
    "F1Score": {"average": "weighted"},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": 3},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "BinaryIoU": {},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
}


def test_additive_metrics_of_keras_are_recognized():
    one_hot = tf.one_hot(np.arange(12) % 3, 3)
    tested = 0
    for name, made in vars(keras.metrics).items():
        if not isinstance(made, type) or made is keras.metrics.Metric:
            continue
        metric = made(**BUILT_IN.get(name, {}))
        if name in ("Mean", "Sum"):
            args: tuple[Any, ...] = (P,)
        elif name.startswith("Sparse"):
            args = (tf.range(12) % 3, P)
        elif name in ("MeanIoU", "IoU"):
            args = (tf.range(12) % 3, tf.range(12) % 2)
        else:
            args = (one_hot, P)
        metric.update_state(*args)
        assert adds_up(metric, metric.update_state, args, {}), name
        metric.reset_state()
        assert not any(np.any(variable.numpy()) for variable in metric.variables), name
        tested += 1
    assert tested > 40


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", [Largest, LargestOfAll, Last, Moving, Product, Seen])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_metric_that_is_not_additive_is_an_error_on_all_ranks(world, kind, method):
    model = classifier(metrics=[kind()])
    world.distribute(model)
    with pytest.raises(ModelError, match=r"metric 'own' \(Own\).*Keep sums"):
        getattr(model, method)(X, Y, batch_size=4, verbose=0)


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> dict[str, Any]:
        results = super().train_step(data)
        self.own.update_state(data[0], data[0])
        return {**results, "own": self.own.result()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("eagerly", [False, True])
def test_metrics_of_a_train_step_are_tested(world, eagerly):
    for kind in (Total, Largest):
        model = OwnStep([keras.Input((6,)), keras.layers.Dense(3)])
        model.own = kind()
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=eagerly)
        world.distribute(model)
        if kind is Total:
            assert "own" in model.fit(X, Y, batch_size=8, verbose=0).history
        else:
            with pytest.raises(ModelError, match="metric 'own'"):
                model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.ranks(1, 2, 3)
def test_a_user_defined_sum_is_exact(world):
    class Positive(keras.metrics.Mean):
        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            super().update_state(ops.max(p, axis=-1), sample_weight)

    alone, together = classifier(metrics=[Positive()]), classifier(metrics=[Positive()])
    world.distribute(together)
    expected = alone.evaluate(X, Y, batch_size=len(X), verbose=0)
    assert together.evaluate(X, Y, batch_size=4, verbose=0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(1)
def test_one_rank_accepts_any_metric(world):
    model = classifier(metrics=[Largest()])
    world.distribute(model)
    assert model.evaluate(X, Y, verbose=0)[1] > 0


@pytest.mark.ranks(2)
def test_only_first_replica_aggregation_uses_the_chiefs_value(world):
    class First(OwnMetric):
        def __init__(self) -> None:
            super().__init__()
            self.rank = self.add_variable((), "zeros", aggregation="only_first_replica")

        def updated(self, value: Any, new: Any) -> Any:
            self.rank.assign(world.rank() + 7.0)
            return value + new

        def result(self) -> Any:
            return self.rank + 0.0

    model = classifier(metrics=[First()])
    world.distribute(model)
    assert model.evaluate(X, Y, batch_size=4, verbose=0)[1] == 7.0
