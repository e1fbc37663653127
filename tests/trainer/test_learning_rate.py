"""Learning rates: scaling by the number of ranks, warm-up, and rescaling after losses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.trainer import learning_rate
from hvdtrain.trainer.learning_rate import prepare_rescaling, rescale_rate, rescale_restored_rate
from hvdtrain.trainer.membership import Change
from tests.trainer.features import X, Y, classifier

DECAY = {"initial_learning_rate": 0.3, "decay_steps": 10, "decay_rate": 0.5}


@pytest.fixture
def not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has not called ``scale_learning_rate``."""
    monkeypatch.setattr(learning_rate, "_program_scales", False)


@pytest.fixture
def scaled(world: Any, not_scaled: None) -> None:
    """A program on one rank that has called it."""
    assert world.scale_learning_rate(0.3) == 0.3


def schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(**DECAY)


def multiple(rate: Any) -> Any:
    """Return a ``MultiOptimizer`` for biases and other weights."""
    others = {".*bias": keras.optimizers.SGD(rate)}
    rest = keras.optimizers.SGD(rate)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(rest, others))


KINDS = pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.SGD,
        lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)),
        pytest.param(
            multiple,
            marks=pytest.mark.skipif(
                not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.14"
            ),
        ),
    ],
    ids=["plain", "loss scale", "multi"],
)


RATES = ["number", "schedule", "function"]


def step_of(optimizer: Any) -> tuple[Callable[[], list[float]], list[int]]:
    """Return a traced step and its list of traces. The step returns the updates of two weights."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer.build(model.trainable_variables)
    traces = []

    @tf.function
    def apply() -> None:
        traces.append(1)
        ones = [tf.ones(v.shape) for v in model.trainable_variables]
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            ones = [optimizer.scale_loss(g) for g in ones]
        optimizer.apply(ones, model.trainable_variables)

    def step() -> list[float]:
        before = [v.numpy().item() for v in model.trainable_variables]
        apply()
        return [b - v.numpy().item() for b, v in zip(before, model.trainable_variables)]

    return step, traces


@KINDS
@pytest.mark.parametrize("rate", [lambda: 0.3, schedule, lambda: lambda: 0.3], ids=RATES)
def test_the_next_traced_step_uses_the_new_rate(scaled, make, rate):
    optimizer = make(rate())
    prepare_rescaling(optimizer)
    prepare_rescaling(optimizer)  # the model is distributed again
    step, traces = step_of(optimizer)
    decay = [1.0] * 3 if rate is not schedule else [0.5 ** (n / 10) for n in range(3)]
    assert step() == pytest.approx([0.3 * decay[0]] * 2, rel=1e-4)
    rescale_rate(optimizer, 3, 2)
    assert step() == pytest.approx([0.2 * decay[1]] * 2, rel=1e-4)
    rescale_rate(optimizer, 2, 1)
    assert step() == pytest.approx([0.1 * decay[2]] * 2, rel=1e-4)
    assert len(traces) == 1


@pytest.mark.parametrize("rate", [lambda: 0.3, lambda: lambda: 0.3], ids=["number", "function"])
def test_a_rate_that_was_not_scaled_is_not_rescaled(not_scaled, rate):
    optimizer = keras.optimizers.SGD(rate())
    prepare_rescaling(optimizer)
    step, _ = step_of(optimizer)
    rescale_rate(optimizer, 3, 1)
    assert step() == pytest.approx([0.3] * 2, rel=1e-4)


class Shrink(keras.callbacks.Callback):
    """Rescales the rate as if two of three ranks were lost after a step."""

    def __init__(self, after: int, warm_up: Any = None) -> None:
        super().__init__()
        self.rates: list[float] = []
        self._after = after
        self._warm_up = warm_up

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self.rates.append(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
        if len(self.rates) == self._after:
            rescale_rate(optimizer, 3, 1)
            if self._warm_up:
                self._warm_up.on_ranks_lost(Change(before=(0, 1, 2), now=(1,)))


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="graph"), pytest.param(True, id="XLA", marks=pytest.mark.slow)],
)
def test_fit_continues_with_the_new_rate(scaled, compiled):
    def train(rate: Any, *callbacks: Any) -> keras.Model:
        model = classifier(optimizer=keras.optimizers.SGD(rate), jit_compile=compiled)
        prepare_rescaling(model.optimizer)
        model.fit(X[:48], Y[:48], batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        return model

    changed = train(schedule(), Shrink(after=2))
    expected = train(Piecewise())
    for one, other in zip(changed.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    other = train(schedule())
    assert np.abs(changed.get_weights()[0] - other.get_weights()[0]).max() > 1e-3


class Piecewise(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that returns ``schedule()`` for two steps and a third of it after that."""

    def __call__(self, step: Any) -> Any:
        return schedule()(step) * tf.where(step < 2, 1.0, 1 / 3)


@pytest.mark.slow
def test_the_saved_optimizer_has_the_programs_schedule(scaled, run_command, tmp_path: Path):
    model = classifier(optimizer=keras.optimizers.Adam(schedule()))
    plain = model.optimizer.get_config()
    variables = len(model.optimizer.variables)
    prepare_rescaling(model.optimizer)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Shrink(after=2)])
    assert model.optimizer.get_config() == plain
    assert type(model.optimizer._learning_rate) is keras.optimizers.schedules.ExponentialDecay
    assert len(model.optimizer.variables) == variables + 2 * len(model.trainable_variables)

    path = tmp_path / "model.keras"
    model.save(path)
    assert b"hvdtrain" not in path.read_bytes()
    elsewhere = (
        "import sys, keras\n"
        f"optimizer = keras.saving.load_model({str(path)!r}).optimizer\n"
        "assert 'hvdtrain' not in sys.modules\n"
        "rate = optimizer._learning_rate\n"
        "print(type(rate).__name__, rate.get_config(), int(optimizer.iterations))\n"
    )
    done = run_command([sys.executable, "-c", elsewhere], timeout_s=120)
    assert done.returncode == 0, done
    steps = model.optimizer.iterations.numpy()
    assert f"ExponentialDecay {schedule().get_config()} {steps}" in done.stdout


@pytest.mark.ranks(2)
def test_warm_up_reaches_the_scaled_rate(world):
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    model = classifier(optimizer=keras.optimizers.SGD(world.scale_learning_rate(0.1)))
    world.distribute(model)
    warm_up = world.WarmUp(initial=0.1, epochs=2)
    model.fit(X[:48], Y[:48], batch_size=6, epochs=3, verbose=0, callbacks=[warm_up, Watch()])
    assert rates[0] == pytest.approx(0.1)
    assert rates[4] == pytest.approx(0.15)
    assert rates[8:] == [pytest.approx(0.2)] * 4


@pytest.mark.ranks(1, 2)
def test_warm_up_on_data_of_unknown_length_needs_steps_per_epoch(world):
    data = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48])).filter(lambda x, y: True).batch(12)
    steps = 4 // world.size()

    def rates(**given: Any) -> list[float]:
        model = classifier(optimizer=keras.optimizers.SGD(0.5))
        world.distribute(model)
        watch = Shrink(after=0)
        warm_up = world.WarmUp(initial=0.1, epochs=2, **given)
        model.fit(data, epochs=3, verbose=0, callbacks=[warm_up, watch])
        return watch.rates

    def ramp(length: int) -> list[float]:
        done = [epoch + min(n / length, 1) for epoch in range(3) for n in range(steps)]
        return [0.1 + min(share / 2, 1) * 0.4 for share in done]

    with pytest.raises(ModelError, match="pass steps_per_epoch to WarmUp"):
        rates()
    assert rates(steps_per_epoch=steps) == pytest.approx(ramp(steps))
    assert rates(steps_per_epoch=1) == pytest.approx(ramp(1))  # the rate never decreases
    with pytest.raises(ModelError, match="at least 1, got 0"):
        world.WarmUp(initial=0.1, steps_per_epoch=0)


@pytest.mark.parametrize("follows", [True, False], ids=["scaled", "not scaled"])
def test_the_target_of_warm_up_is_rescaled(world, not_scaled, follows):
    rate = world.scale_learning_rate(0.3) if follows else 0.3
    model = classifier(optimizer=keras.optimizers.SGD(rate))
    warm_up = world.WarmUp(initial=0.1, epochs=2)
    watch = Shrink(after=5, warm_up=warm_up)
    model.fit(X[:48], Y[:48], batch_size=12, epochs=3, verbose=0, callbacks=[warm_up, watch])
    target = 0.1 if follows else 0.3
    there = [0.1 + n / 8 * (0.3 - 0.1) for n in range(5)]
    then = [0.1 + n / 8 * (target - 0.1) for n in range(5, 8)]
    assert watch.rates == pytest.approx([*there, *then, *[target] * 4])


def test_only_plain_rates_are_rescaled_after_restoring(scaled):
    plain, computed = keras.optimizers.SGD(0.3), keras.optimizers.SGD(schedule())
    for optimizer in (plain, computed):
        prepare_rescaling(optimizer)
        rescale_restored_rate(optimizer, before=3, now=2)
    assert float(plain.learning_rate.numpy()) == pytest.approx(0.2)
    assert float(computed.learning_rate) == pytest.approx(0.3)
