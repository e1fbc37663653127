"""Training with Keras' JAX backend: its compiled steps, their state and their errors."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.checkpoint import Store
from hvdtrain.errors import ModelError, NonFiniteError, PeerFailedError
from hvdtrain.trainer.batch_normalization import SyncBatchNormalization
from tests.trainer.equivalence import check_close

ROWS = 33  # the last step has a row on rank 0 only
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SGD = keras.optimizers.SGD

pytestmark = [pytest.mark.ranks(2), pytest.mark.backends("jax")]


class OwnStep(keras.Model):
    """A model whose step is written as in Keras' guide, with an optimizer for each layer."""

    def add_optimizer(self) -> None:
        self.second = SGD(0.02, momentum=0.9)
        self.second.build(self.layers[-1].trainable_variables)
        self.second_state = self.second.variables  # becomes a part of the model's state

    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, optimizer, metrics = state
        x, y = data

        def loss_of(trainable: Any) -> Any:
            y_pred, new = self.stateless_call(trainable, others, x, training=True)
            return self.compute_loss(x, y, y_pred), new

        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        places = {id(v): n for n, v in enumerate(self.non_trainable_variables)}
        own = [places[id(variable)] for variable in self.second_state]
        first, optimizer = self.optimizer.stateless_apply(optimizer, gradients[:2], trainable[:2])
        last, changed = self.second.stateless_apply(
            [others[n] for n in own], gradients[2:], trainable[2:]
        )
        others = list(others)
        for n, value in zip(own, changed):
            others[n] = value
        return {"own loss": loss}, ([*first, *last], others, optimizer, metrics)


def _model(kind: type[keras.Model] = keras.Model, normalize: bool = False, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    start = keras.Input((4,))
    inner = keras.layers.Dense(6, activation="relu")(start)
    if normalize:
        together = SyncBatchNormalization if normalize == "together" else None
        inner = (together or keras.layers.BatchNormalization)(momentum=0.5)(inner)
    model = kind(start, keras.layers.Dense(1)(inner))
    options = {"optimizer": SGD(0.05), "loss": "mse", "metrics": ["mae"], **options}
    model.compile(**options)
    if kind is OwnStep:
        model.optimizer.build(model.layers[1].trainable_variables)
        model.add_optimizer()
    return model


def _options(**options: Any) -> Any:
    return lambda: {name: make() if callable(make) else make for name, make in options.items()}


CASES = {
    "plain": _options(),
    "eager": _options(run_eagerly=True),
    "not compiled": _options(jit_compile=False),
    "normalization": _options(normalize="together"),
}


def _fit(model: keras.Model, batch_size: int, **options: Any) -> dict[str, list[float]]:
    history = model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **options)
    return history.history


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_like_one_process(world, name):
    together, alone = _model(**CASES[name]()), _model(**{**CASES[name](), **_without_ranks(name)})
    world.distribute(together)
    history, expected = _fit(together, 4), _fit(alone, 8)
    check_close(together.get_weights(), alone.get_weights())
    check_close(history, expected)


def _without_ranks(name: str) -> dict[str, Any]:
    return {"normalize": "alone"} if name == "normalization" else {}


def test_a_custom_step_with_two_optimizers_trains_like_one_process(world):
    together, alone = _model(OwnStep), _model(OwnStep)
    world.distribute(together)
    history, expected = _fit(together, 4), _fit(alone, 8)
    check_close(together.get_weights(), alone.get_weights())
    # Keras reports the values of the last step, whose only row is on rank 0.
    check_close(history, expected)


def test_callbacks_read_the_state_and_call_collectives_within_an_epoch(world):
    seen: list[np.ndarray] = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.jax_state_sync()
            weights = self.model.get_weights()[0]
            seen.append(job.collectives().allreduce(weights, "average", name="test") - weights)

    model = _model()
    world.distribute(model)
    _fit(model, 4, callbacks=[Reads()])
    assert len(seen) == 10
    assert not np.any(seen)


def test_batches_passed_to_single_steps_are_weighted_by_rows(world):
    together, alone = _model(), _model()
    world.distribute(together)
    own = slice(0, 10) if job.rank() == 0 else slice(10, ROWS)
    together.train_on_batch(X[own], Y[own])
    alone.train_on_batch(X, Y)
    check_close(together.get_weights(), alone.get_weights())
    assert together.test_on_batch(X[own], Y[own])[0] > 0
    assert together.predict_on_batch(X[own]).shape == Y[own].shape


def test_after_a_failed_reduction_the_model_has_the_values_before_the_step(world, tmp_path):
    """JAX frees what a compiled step receives, even if the step fails."""
    model = _model(normalize="together", steps_per_execution=2)
    alone = _model(normalize="alone")
    world.distribute(model)
    x = X.copy()
    x[29] = np.nan  # in the second rank's part of the fourth joint batch
    checkpoint = world.Checkpoint(tmp_path, every_steps=1)
    with pytest.raises(NonFiniteError, match="on rank 1"):
        model.fit(x, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[checkpoint])
    for step in range(3):
        alone.train_on_batch(X[8 * step :][:8], Y[8 * step :][:8])
    check_close(model.get_weights(), alone.get_weights())
    saved = Store(tmp_path).newest()
    assert saved.step == 2 if world.is_chief() else saved is None

    with pytest.raises(NonFiniteError, match="on rank 1"):
        model.train_on_batch(x[28 + job.rank() :][:1], Y[:1])
    check_close(model.get_weights(), alone.get_weights())
    assert np.isfinite(_fit(model, 4)["loss"]).all()


class _Unreadable(keras.utils.PyDataset):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == self.number:
            raise ValueError("unreadable")
        return X[4 * index :][:4], Y[4 * index :][:4]


def test_errors_in_the_data_leave_the_model_its_values(world):
    model = _model()
    world.distribute(model)
    for number, call in ((1, "fit"), (2, "evaluate"), (2, "predict")):
        before = model.get_weights()
        with pytest.raises((ValueError, PeerFailedError), match="unreadable"):
            getattr(model, call)(_Unreadable(number), verbose=0)
        for value, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(value, other)


class _Fails(keras.Model):
    """A model with a callback that fails in the third step."""

    def train_step(self, state: Any, data: Any) -> Any:
        import jax
        from jax.experimental import io_callback

        def host(iterations: Any) -> Any:
            assert int(iterations) < 2, "failed"
            return iterations

        logs, (*others, metrics) = super().train_step(state, data)
        like = jax.ShapeDtypeStruct((), others[2][0].dtype)
        others[2][0] = io_callback(host, like, others[2][0], ordered=True)
        return logs, (*others, metrics)


def test_an_error_names_a_model_that_has_lost_its_values(world):
    model = _model(_Fails)
    world.distribute(model)
    with pytest.raises(Exception, match="failed") as caught:
        _fit(model, 4)
    assert "has lost its values" in caught.value.__notes__[-1]


def test_a_second_fit_treats_nan_as_its_own_callbacks_say(world):
    model = _model()
    world.distribute(model)
    _fit(model, 4)
    x = np.full_like(X, np.nan)
    options = {"batch_size": 4, "epochs": 2, "verbose": 0}
    history = model.fit(x, Y, callbacks=[keras.callbacks.TerminateOnNaN()], **options)
    assert len(history.epoch) == 1
    with pytest.raises(NonFiniteError):
        model.fit(x, Y, **options)


class _Largest(keras.metrics.Metric):
    def __init__(self, adds: bool) -> None:
        super().__init__(name="own")
        self.value = self.add_weight(shape=(), initializer="zeros")
        self.adds = adds

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        new = keras.ops.sum(y)
        self.value.assign(self.value + new if self.adds else keras.ops.maximum(self.value, new))

    def result(self) -> Any:
        return self.value.value


def test_metrics_that_are_not_additive_are_an_error(world):
    model = _model(metrics=[_Largest(adds=True)])
    world.distribute(model)
    np.testing.assert_allclose(_fit(model, 4)["own"], [Y.sum()] * 2, rtol=1e-5)
    model = _model(metrics=[_Largest(adds=False)])
    world.distribute(model)
    with pytest.raises(ModelError, match="can't be combined over 2 ranks"):
        _fit(model, 4)


def test_a_distribution_of_keras_is_an_error(world):
    model = _model()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        with pytest.raises(ModelError, match=r"keras\.distribution is set"):
            world.distribute(model)
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.more
@pytest.mark.timeout(300)
def test_two_thousand_steps_run_without_a_deadlock(world):
    """JAX issues 24255 and 25861 report deadlocks of callbacks."""
    model = _model(normalize="together", steps_per_execution=4)
    world.distribute(model)
    x, y = np.tile(X, (8, 1)), np.tile(Y, (8, 1))
    model.fit(x, y, batch_size=4, epochs=61, verbose=0)
    assert int(job.collectives().allreduce(model.optimizer.iterations.numpy(), "min")) >= 2000
