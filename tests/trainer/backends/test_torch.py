"""Training with Keras' torch backend: compiled steps, live variables, and Keras' own DDP."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.config import Settings
from hvdtrain.errors import ModelError, NonFiniteError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer import backends
from tests.trainer.equivalence import check_close

ROWS = 33  # the last joint step has a row on rank 0 only
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WEIGHTS = np.linspace(0.0, 2.0, ROWS)

pytestmark = [pytest.mark.ranks(2), pytest.mark.backends("torch")]


def _model(normalize: type[Any] | None = None, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(6, activation="relu")]
    if normalize is not None:
        layers.append(normalize(momentum=0.5))
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(**{"optimizer": optimizer, "loss": "mse", "metrics": ["mae"], **options})
    return model


@pytest.mark.more
@pytest.mark.timeout(300)
def test_a_compiled_step_trains_like_one_process_and_is_compiled_once(world, monkeypatch):
    """Rank 1 has fewer rows, so that the weights of the steps change on rank 0."""
    from torch._dynamo import config, utils
    from torch._inductor.config import patch

    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    # Vector instructions, and processes that compile, would take longer than the rest.
    options = {"cpp.vec_isa_ok": False, "compile_threads": 1}

    class NoMoreCompilation(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            monkeypatch.setattr(config, "error_on_recompile", True)

    together = _model(loss=loss, jit_compile=True)
    world.distribute(together, presharded=True)
    rows = slice(0, 20) if job.rank() == 0 else slice(20, 28)  # batches of 4 rows: five and two
    with patch(options):
        together.fit(
            X[rows],
            Y[rows],
            sample_weight=WEIGHTS[rows],
            batch_size=4,
            shuffle=False,
            verbose=0,
            callbacks=[NoMoreCompilation()],
        )
    assert utils.counters["inductor"]

    alone = _model(loss=loss)
    for step in range(5):
        joint = np.concatenate([np.arange(20)[4 * step :][:4], np.arange(20, 28)[4 * step :][:4]])
        alone.train_on_batch(X[joint], Y[joint], WEIGHTS[joint])
    check_close(together.get_weights(), alone.get_weights())


def test_a_rank_without_rows_keeps_its_metrics_and_statistics(world):
    """Variables of torch are changed in place, so earlier values must be copies."""
    seen = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            statistics = [np.array(w) for w in self.model.layers[1].get_weights()[2:]]
            seen.append((statistics, logs["mae"]))

    model = _model(keras.layers.BatchNormalization)
    world.distribute(model)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[Reads()])
    (before, mae_before), (after, mae_after) = seen[-2:]
    unchanged = all(map(np.array_equal, before, after)), mae_before == mae_after
    assert unchanged == ((True, True) if job.rank() == 1 else (False, False))


def test_batches_passed_to_single_steps_are_weighted_by_rows(world):
    together, alone = _model(), _model()
    world.distribute(together)
    own = slice(0, 10) if job.rank() == 0 else slice(10, ROWS)
    together.train_on_batch(X[own], Y[own])
    alone.train_on_batch(X, Y)
    check_close(together.get_weights(), alone.get_weights())
    if world.is_chief():  # a single rank may call these
        assert together.test_on_batch(X[own], Y[own])[0] > 0
        assert together.predict_on_batch(X[own]).shape == Y[own].shape


def test_an_error_of_one_rank_is_raised_on_every_rank_as_itself(world):
    x = X.copy()
    x[1] = np.nan
    model = _model()
    world.distribute(model)
    with pytest.raises(NonFiniteError, match="on rank 0"):
        model.fit(x, Y, batch_size=4, shuffle=False, verbose=0)


def test_several_steps_per_call_are_refused_as_keras_does(world):
    model = _model(steps_per_execution=2)
    world.distribute(model)
    with pytest.raises(ValueError, match="steps_per_execution"):
        model.fit(X, Y, batch_size=4, verbose=0)


def test_a_model_that_keras_distributes_is_an_error(world):
    """Keras 3.16 wraps a model if the program has initialized ``torch.distributed``."""
    model = _model()
    model.ddp_model = None
    world.distribute(model)
    model.ddp_model = keras.Sequential([keras.Input((4,))])
    with pytest.raises(ModelError, match=r"torch\.distributed is initialized"):
        world.distribute(model)


def test_towers_are_an_error(world):
    settings = Settings(mode="towers", devices_per_rank=2)
    reducer = GradientReducer.of_job()
    make_steps = backends.of_keras().make_steps
    with pytest.raises(ModelError, match="needs the Keras backend tensorflow, got torch"):
        make_steps(_model(), reducer, settings, synchronized=[], warn=print)
