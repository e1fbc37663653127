from __future__ import annotations

import os
import signal
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.checkpoint import Store
from hvdtrain.collectives.engine import single_engine
from hvdtrain.private_api.keras import iterations_of
from hvdtrain.trainer.saving.checkpoint_callback import Checkpoint
from hvdtrain.trainer.saving.training_state import TrainingState
from tests.checkpoint.samples import saved_steps
from tests.trainer.saving.runs import Stop, StopAfter, X, Y, model_of, outcome, run

DILOCO = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}


def make() -> keras.Model:
    """Return a model with many states that differ between ranks. An epoch has six steps."""
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()]
    optimizer = keras.optimizers.Adam(0.01, use_ema=True)
    return model_of([*layers, keras.layers.Dropout(0.4)], optimizer=optimizer)


def fit(*callbacks: Any, epochs: int = 3) -> Any:
    def train(model: keras.Model) -> Any:
        options = {"epochs": epochs, "callbacks": [*callbacks], "validation_data": (X, Y)}
        return model.fit(X, Y, batch_size=6, verbose=0, **options)

    return train


@pytest.mark.ranks(2)
def test_a_resumed_training_equals_one_without_checkpoints(local_sgd, tmp_path):
    """The results are bitwise equal on each rank.

    Checkpoints are delayed until the end of a round or epoch.
    """
    world = local_sgd(4, **DILOCO)
    whole = outcome(*run(world, make, fit(), seed=1))
    saving = Checkpoint(tmp_path, every_steps=1)
    with pytest.raises(Stop):
        run(world, make, fit(saving, StopAfter(5)), seed=1)
    if world.is_chief():
        # A checkpoint is skipped while the previous one is being written.
        assert {4} <= {*saved_steps(tmp_path)} <= {4, 6}
    # Use a different seed, because the state must come from the checkpoint.
    resumed = outcome(*run(world, make, fit(Checkpoint(tmp_path, every_steps=1)), seed=9))
    for name in whole:
        assert resumed[name] == whole[name], name


@pytest.mark.more
@pytest.mark.ranks(2)
def test_a_checkpoint_waits_for_the_end_of_the_epoch_if_rounds_are_longer(local_sgd, tmp_path):
    world = local_sgd(100)
    with pytest.raises(Stop):
        run(world, make, fit(Checkpoint(tmp_path, every_steps=4), StopAfter(7)), seed=1)
    if world.is_chief():
        saved = Store(tmp_path).newest()
        assert (saved.step, saved.state["epoch"], saved.state["place"]["epoch_step"]) == (6, 1, 0)


@pytest.mark.ranks(2)
def test_a_signal_ends_the_current_round(local_sgd, tmp_path):
    world = local_sgd(100)
    means: list[np.ndarray] = []

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                first = self.model.trainable_variables[0].numpy()
                means.append(job.collectives().allreduce(first, "average", name="test"))
            if batch == 1 and world.rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(world.Preempted):
        run(world, make, fit(Kill(), Checkpoint(tmp_path, every_steps=1)), seed=1)
    if world.is_chief():
        saved = Store(tmp_path).newest()
        assert saved.step == 2
        (first,) = [v for name, v in saved.model.items() if name.startswith("weights/0000")]
        np.testing.assert_array_equal(first, means[0])
    _, history = run(world, make, fit(Checkpoint(tmp_path), epochs=1), seed=1)
    assert history.epoch == [0]


@pytest.mark.more
@pytest.mark.ranks(2)
def test_modes_resume_from_each_others_checkpoints(world, local_sgd, tmp_path):
    """In post-local SGD, for example, gradients are averaged first, and weights later."""
    modes = [lambda: world, lambda: local_sgd(4, **DILOCO), lambda: local_sgd(2)]
    for epochs, mode in enumerate(modes, 1):
        model, history = run(mode(), make, fit(Checkpoint(tmp_path), epochs=epochs), seed=epochs)
        assert history.epoch == [*range(epochs)]
        (optimizer,) = [model.optimizer]
        assert int(iterations_of(optimizer).numpy()) == 6 * epochs
    losses = history.history["loss"]
    assert losses[2] < losses[0]


def test_resuming_on_a_different_number_of_ranks_averages_optimizer_states():
    model = make()
    model.optimizer.build(model.trainable_variables)
    samples = keras.Variable(0, dtype="int64", trainable=False)
    state = TrainingState(model, single_engine(), samples, own_optimizers=True)
    optimizer = model.optimizer
    momenta = [v for v in optimizer.variables if "momentum" in v.path]
    saved: dict[str, np.ndarray] = {}
    for rank in range(2):
        iterations_of(optimizer).assign(7)
        for variable in momenta:
            variable.assign(np.full(variable.shape, rank + 1.0))
        own = state.gather_own()
        saved.update({key.replace("rank/0", f"rank/{rank}", 1): own[key].copy() for key in own})
    optimizer.learning_rate = 0.5
    state.restore_part(saved, 2, rank=0, size=1)
    assert momenta
    assert all((v.numpy() == 1.5).all() for v in momenta)
    assert int(iterations_of(optimizer).numpy()) == 7
    # The rate may have to follow the number of ranks.
    assert float(optimizer.learning_rate) == 0.5
