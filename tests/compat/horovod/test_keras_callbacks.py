"""Horovod's callbacks in a plain ``fit``."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.compat.horovod.keras_callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from hvdtrain.errors import ModelError

several = pytest.mark.ranks(1, 3)
X, Y = np.ones((12, 2), "float32"), np.zeros((12, 1), "float32")


def compiled_model(rate=0.1, built=True) -> keras.Model:
    layers = [keras.layers.Dense(1, kernel_initializer="ones", name="only")]
    model = keras.Sequential([keras.Input((2,)), *layers] if built else layers)
    model.compile(keras.optimizers.SGD(rate, momentum=0.5), "mse")
    return model


class Recorder(keras.callbacks.Callback):
    """Records the learning rate and a weight after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.weights: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))
        self.weights.append(float(self.model.get_weights()[0][0, 0]))


def train(model, *callbacks, epochs=1):
    recorder = Recorder()
    history = model.fit(
        X,
        Y,
        batch_size=4,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        callbacks=[*callbacks, recorder],
    )
    return history.history, recorder


@several
@pytest.mark.parametrize("built", [True, False])
def test_broadcast_of_variables(world, built):
    model = compiled_model(rate=0.0, built=built)
    if built:
        bias = np.full(1, job.rank() + 2.0)
        model.set_weights([np.full((2, 1), job.rank() + 1.0), bias])
    local = model.layers[0].bias if built else None
    train(model, BroadcastGlobalVariablesCallback(job.size() - 1, local_variables=local))
    kernel, local_bias = model.get_weights()
    np.testing.assert_array_equal(kernel, np.full((2, 1), float(job.size()) if built else 1.0))
    if built:
        np.testing.assert_array_equal(local_bias, bias)


@several
def test_broadcast_before_the_first_step(world):
    model = compiled_model(rate=0.1)
    model.set_weights([np.full((2, 1), job.rank() + 1.0), np.zeros(1)])
    _, expected = train(compiled_model(rate=0.1))
    _, recorder = train(model, BroadcastGlobalVariablesCallback(0))
    np.testing.assert_allclose(recorder.weights, expected.weights, rtol=1e-6)


def test_invalid_local_variables(world):
    with pytest.raises(ValueError, match="local_variables must be variables, got str"):
        BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])


@several
def test_metric_average(world):
    logs = {"loss": job.rank() + 1.0, "accuracy": np.float32(0.5)}
    MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (job.size() + 1) / 2, "accuracy": 0.5}
    MetricAverageCallback().on_epoch_end(0, None)


def test_learning_rate_per_epoch(world):
    from_second = LearningRateScheduleCallback(0.2, 0.5, start_epoch=1, end_epoch=3)
    history, recorder = train(compiled_model(0.1), from_second, epochs=4)
    np.testing.assert_allclose(recorder.rates[::3], [0.1, 0.2, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [0.1, 0.2, 0.1, 0.1], rtol=1e-6)


def test_learning_rate_per_step(world):
    callback = LearningRateScheduleCallback(0.3, lambda epoch: 1.0 + epoch, staircase=False)
    _, recorder = train(compiled_model(), callback, epochs=2)
    np.testing.assert_allclose(recorder.rates, 0.3 * (1 + np.arange(6) / 3), rtol=1e-6)


@several
def test_warmup(world, capfd):
    callback = LearningRateWarmupCallback(0.6, warmup_epochs=2, verbose=1)
    _, recorder = train(compiled_model(), callback, epochs=3)
    ranks = job.size()
    steps = np.minimum((np.arange(9) + 1) / 3, 2)
    np.testing.assert_allclose(
        recorder.rates, 0.6 / ranks * (steps * (ranks - 1) / 2 + 1), rtol=1e-6
    )
    message = "Epoch 2: finished gradual learning rate warmup to 0.6."
    assert (message in capfd.readouterr().out) == job.is_chief()


def test_invalid_learning_rates(world):
    with pytest.raises(ValueError, match="initial_lr must be a number"):
        LearningRateScheduleCallback(None, 1.0)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ModelError, match="can't set the learning rate"):
        train(compiled_model(schedule), LearningRateScheduleCallback(0.1, 1.0))


def test_best_model_checkpoint(world, tmp_path):
    file = tmp_path / "best.keras"
    train(compiled_model(), BestModelCheckpoint(file, monitor="loss"), epochs=2)
    assert keras.saving.load_model(file).get_weights()[0].shape == (2, 1)
