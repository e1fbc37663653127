"""Ranks without rows in a step, and moving statistics weighted by rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.trainer.moving_statistics import MovingStatistics
from hvdtrain.trainer.saving.training_state import TrainingState
from tests.trainer.equivalence import check_close
from tests.trainer.test_losses import Smallest

ROWS = 22
X = np.random.default_rng(3).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
# Most rows on one rank, two on the next, and zero on the third.
OWN_ROWS = {2: [range(2, 22), range(2)], 3: [range(2, 22), range(2), range(0)]}


class NanForZeros(keras.layers.Layer):
    """Makes the loss and all gradients of a placeholder batch NaN."""

    def call(self, x: Any) -> Any:
        norms = tf.reduce_sum(tf.square(x), axis=-1, keepdims=True)
        return x * norms / norms


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def _sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, **options)


def _model(kind: type[keras.Model], synchronized: bool, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    start = keras.Input((4,))
    normalized = keras.layers.BatchNormalization(
        momentum=0.5, synchronized=synchronized, name="normalization"
    )(NanForZeros()(start))
    model = kind(start, keras.layers.Dense(1)(normalized))
    model.compile(**{"optimizer": _sgd(), "loss": "mse", **options})
    return model


def _moments(model: keras.Model) -> list[np.ndarray]:
    layer = model.get_layer("normalization")
    return [np.asarray(layer.moving_mean.value), np.asarray(layer.moving_variance.value)]


def _expected() -> list[np.ndarray]:
    """Return the moments after two epochs.

    An epoch has one step with the rows of two ranks, and nine steps with the rows of one rank.
    """
    mean, variance = np.zeros(4), np.ones(4)
    for _ in range(2):
        for start in range(2, ROWS, 2):
            batches = [X[start : start + 2]] + ([X[:2]] if start == 2 else [])
            mean = 0.5 * mean + 0.5 * np.mean([b.mean(axis=0) for b in batches], axis=0)
            variance = 0.5 * variance + 0.5 * np.mean([b.var(axis=0) for b in batches], axis=0)
    return [mean, variance]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"run_eagerly": True},
    "compiled": {"jit_compile": True},
    "blocks of steps": {"steps_per_execution": 3},
    "accumulation": {"optimizer": lambda: _sgd(gradient_accumulation_steps=2)},
    "loss scaling": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(_sgd())},
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, keras.Model) for name in CASES),
        # The others only change Keras' step, or differ in the optimizer's update.
        *((name, OwnStep) for name in ("plain", "accumulation", "loss scaling")),
    ],
)
def test_a_rank_without_rows_contributes_nothing(world, name, kind):
    options = dict(CASES[name])
    if "optimizer" in options:
        options["optimizer"] = options["optimizer"]()
    model = _model(kind, False, **options)
    world.distribute(model, presharded=True)
    own_rows = list(OWN_ROWS[3][world.rank()])
    options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    logs = model.fit(X[own_rows], Y[own_rows], **options).history
    for found, expected in zip(_moments(model), _expected()):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.isfinite(logs["loss"]).all()
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    digests = [weight.tobytes().hex() for weight in model.get_weights()]
    assert job.collectives().allgather_object(digests, name="test") == [digests] * 3


@pytest.mark.ranks(3)
def test_synchronized_layers_in_a_custom_step_ignore_ranks_without_rows(world):
    alone = _model(OwnStep, True)
    for _ in range(2):
        first = [2, 3, 0, 1]
        alone.fit(X[first], Y[first], batch_size=4, shuffle=False, verbose=0)
        alone.fit(X[4:], Y[4:], batch_size=2, shuffle=False, verbose=0)
    together = _model(OwnStep, True)
    world.distribute(together, presharded=True)
    own_rows = list(OWN_ROWS[world.size()][world.rank()])
    together.fit(X[own_rows], Y[own_rows], batch_size=2, epochs=2, shuffle=False, verbose=0)
    check_close(together.get_weights(), alone.get_weights())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batches", ["array", "dataset"])
def test_the_last_step_of_an_epoch_is_weighted_by_rows(world, batches):
    model = _model(keras.Model, False)
    world.distribute(model)
    if batches == "array":
        model.fit(X[:21], Y[:21], batch_size=4, epochs=2, shuffle=False, verbose=0)
        steps = [X[:8], X[8:16], X[16:21]]
    else:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        model.fit(data, epochs=2, verbose=0)
        steps = [X[:8], X[8:16], X[16:22]]
    mean = np.zeros(4)
    for step in [*steps, *steps]:
        mean = 0.5 * mean + 0.5 * step.mean(axis=0)
    np.testing.assert_allclose(_moments(model)[0], mean, rtol=1e-5, atol=1e-6)


class Watched(keras.layers.Layer):
    """Counts its calls in training, draws random numbers, and rejects a placeholder batch."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(
            shape=(), dtype="int32", trainable=False, initializer="zeros", name="calls"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        self.calls.assign_add(1)
        with tf.control_dependencies([tf.debugging.assert_none_equal(x, 0.0)]):
            return x + 0.0 * keras.random.normal(tf.shape(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("exchanged", "jit"),
    [
        *(("nothing", False), ("counts", False), ("moments", False)),
        *(("nothing", True), ("counts", True)),  # moments are exchanged outside of XLA, like counts
    ],
)
def test_a_model_does_not_run_without_rows(world, exchanged, jit):
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4,)), Watched(), keras.layers.Dense(1)]
        if exchanged == "moments":
            layers.insert(2, keras.layers.BatchNormalization(momentum=0.5, synchronized=True))
        model = keras.Sequential(layers)
        loss = Smallest() if exchanged == "counts" else "mse"
        model.compile(_sgd(), loss, jit_compile=jit)
        return model

    alone = make()
    alone.jit_compile = False
    first = [2, 3, 0, 1]
    for _ in range(2):
        alone.fit(X[first], Y[first], batch_size=4, shuffle=False, verbose=0)
        alone.fit(X[4:], Y[4:], batch_size=2, shuffle=False, verbose=0)
    together = make()
    world.distribute(together, presharded=True)
    own_rows = list(OWN_ROWS[world.size()][world.size() - 1 - world.rank()])
    seen: list[int] = []
    calls = together.layers[0].calls
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(int(calls))
    )
    options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    together.fit(X[own_rows], Y[own_rows], callbacks=[watch], **options)
    assert [seen[9], seen[19], int(calls)] == [len(own_rows) // 2, 10 + len(own_rows) // 2, 20]
    check_close(together.get_weights(), alone.get_weights())
    # After training the generators are equal on all ranks.
    drawn = float(keras.random.uniform(()))
    assert job.collectives().allgather_object(drawn, name="test") == [drawn] * world.size()


@pytest.mark.ranks(2)
def test_embeddings_and_unused_weights_of_a_rank_without_rows(world):
    class Sparse(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.dense = keras.layers.Embedding(7, 3), keras.layers.Dense(1)
            self.unused = self.add_weight(shape=(2,), name="unused")

        def call(self, x: Any) -> Any:
            return self.dense(tf.reduce_mean(self.embedding(x), axis=1))

    tokens = np.random.default_rng(4).integers(0, 7, (ROWS, 4))
    weights = []
    for distributed in (False, True):
        keras.utils.set_random_seed(1)
        model = Sparse()
        model(tokens[:1])
        model.compile(_sgd(), "mse")
        rows = ROWS
        if distributed:
            world.distribute(model, presharded=True)
            rows = ROWS if world.is_chief() else 0
        model.fit(tokens[:rows], Y[:rows], batch_size=4, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    check_close(weights[1], weights[0])


class LargestError(keras.metrics.Metric):
    """A metric that holds a tensor of its last update."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.last = tf.reduce_max(tf.abs(y_true - y_pred))

    def result(self) -> Any:
        return self.last


@pytest.mark.ranks(1, 2)
def test_a_metric_may_hold_tensors_of_its_last_update(world):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[LargestError(name="largest")])
    rows = X[2 * world.rank() :][: 8 - 4 * world.rank()]
    largest = [np.abs(model(rows[i : i + 2]) - 1.0).max() for i in range(0, len(rows), 2)]
    world.distribute(model, presharded=True)
    seen: list[float] = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(logs["largest"]))
    )
    options = {"batch_size": 2, "shuffle": False, "verbose": 0}
    model.fit(rows, np.ones((len(rows), 1), "float32"), callbacks=[watch], **options)
    np.testing.assert_allclose(seen[: len(largest)], largest, rtol=1e-5)


@pytest.mark.ranks(2)
def test_a_checkpoint_records_which_ranks_have_complete_statistics(world):
    # The chief made two of ten steps before the job was resumed.
    collectives = job.collectives()

    def make() -> tuple[Any, MovingStatistics, TrainingState]:
        model = keras.Sequential([keras.Input((4,)), Watched(), keras.layers.Dense(1)])
        model.compile(_sgd(), "mse")
        samples = keras.Variable(0, dtype="int64", trainable=False)
        statistics = MovingStatistics(model)
        return model.layers[0].calls, statistics, TrainingState(model, collectives, samples)

    calls, statistics, state = make()
    for _ in range(2 if world.is_chief() else 10):
        with statistics.weighted_by(tf.constant(1.0)):
            calls.assign_add(1)
    saved = state.gather_own()
    calls, statistics, state = make()
    state.restore_own(saved if world.is_chief() else None, 2)
    assert int(calls) == (2 if world.is_chief() else 10)
    statistics.average(collectives)
    assert int(calls) == 10
