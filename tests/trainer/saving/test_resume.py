"""Interrupted and resumed trainings, compared bitwise with uninterrupted ones."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.checkpoint import Store
from hvdtrain.trainer.saving.checkpoint_callback import Checkpoint
from tests.checkpoint.samples import saved_steps
from tests.trainer.saving.runs import ROWS, Draws, Stop, StopAfter, X, Y, model_of, outcome, run

EPOCHS = 3
every_backend = pytest.mark.backends("tensorflow", "torch", "jax")
# For what is the same on all backends. Torch compiles nothing.
one_backend = pytest.mark.backends("torch")


def plain(callbacks: list[Any], **options: Any) -> Any:
    def fit(model: keras.Model) -> Any:
        return model.fit(
            options.pop("x", X),
            options.pop("y", Y),
            epochs=EPOCHS,
            verbose=0,
            callbacks=callbacks,
            **options,
        )

    return fit


def arrays(callbacks: list[Any]) -> Any:
    return plain(callbacks, batch_size=6)


def drawing(callbacks: list[Any]) -> Any:
    return arrays([*callbacks, Draws()])


def dropout() -> keras.Model:
    return model_of([keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.4)])


def accumulating() -> keras.Model:
    """Return a model with statistics, gradients and random states that differ between ranks."""
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.4)]
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3)
    return model_of(layers, optimizer=optimizer)


def averaged() -> keras.Model:
    """Return a model whose optimizer has a large state and a schedule."""
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 12)
    optimizer = keras.optimizers.AdamW(
        schedule, use_ema=True, ema_overwrite_frequency=5, clipnorm=1.0
    )
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2)]
    steps = 1 if keras.backend.backend() == "torch" else 2  # Keras supports no more on torch
    return model_of(layers, optimizer=optimizer, steps_per_execution=steps)


def scaled_loss() -> keras.Model:
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=4)
    policy = keras.DTypePolicy("bfloat16")
    return model_of([keras.layers.Dense(8, "relu", dtype=policy)], optimizer=optimizer)


def check_exact(
    world: Any, make: Any, fit: Any, tmp_path: Any, stop: int, *, every_steps: int | None = 2
) -> None:
    """Interrupt a run after ``stop`` steps, resume it, and compare it with an uninterrupted run."""

    def saving() -> Checkpoint:
        return Checkpoint(tmp_path, every_steps=every_steps)

    whole = outcome(*run(world, make, fit([Checkpoint(tmp_path / "whole")]), seed=1))
    first = saving()
    # A checkpoint is skipped while the previous one is being written.
    settle = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: first.session.writer.wait(60.0)
    )
    with pytest.raises(Stop):
        run(world, make, fit([first, settle, StopAfter(stop)]), seed=1)
    # Use a different seed, because the state must come from the checkpoint.
    resumed = outcome(*run(world, make, fit([saving()]), seed=9))
    for name in whole:
        assert resumed[name] == whole[name], name


@pytest.mark.more
@pytest.mark.ranks(2)
def test_resuming_is_exact_with_stateful_layers(world, tmp_path):

    def make() -> keras.Model:
        layers = [keras.layers.Reshape((2, 3)), keras.layers.GRU(4, stateful=True)]
        model = keras.Sequential([keras.Input(batch_shape=(4, 6)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
        return model

    def fit(callbacks: list[Any]) -> Any:
        options = {"batch_size": 4, "epochs": 3, "shuffle": False, "callbacks": callbacks}
        return lambda model: model.fit(X[:48], Y[:48], verbose=0, **options)

    check_exact(world, make, fit, tmp_path, 8)


@pytest.mark.more
@pytest.mark.ranks(2)
def test_tensorflow_variables_in_layers_are_restored(world, tmp_path):
    import tensorflow as tf

    class Untracked(keras.layers.Dense):
        """Has random and changing TensorFlow variables, which Keras doesn't track."""

        def __init__(self, units: int) -> None:
            super().__init__(units)
            self.scale = tf.Variable(np.random.random(units), dtype=tf.float32)
            self.followed = {"mean": tf.Variable(0.0), "calls": [tf.Variable(0)]}

        def call(self, x: Any) -> Any:
            self.followed["mean"].assign(0.9 * self.followed["mean"] + tf.reduce_mean(x))
            self.followed["calls"][0].assign_add(1)
            return super().call(x) * (self.scale + 0.1 * self.followed["mean"])

        @property
        def own(self) -> list[Any]:
            mean, (calls,) = self.followed.values()
            return [variable.numpy().tolist() for variable in (self.scale, mean, calls)]

    def make() -> keras.Model:
        np.random.seed(20 + world.rank())
        return model_of([Untracked(4)])

    def trained(*callbacks: Any, seed: int) -> list[Any]:
        model, _ = run(world, make, arrays([*callbacks]), seed)
        return [*model.layers[0].own, [v.numpy().tolist() for v in model.trainable_variables]]

    whole = trained(seed=1)
    assert job.collectives().allgather_object(whole, name="test") == [whole] * 2
    assert whole[2] == 3 * 6
    with pytest.raises(Stop):
        trained(Checkpoint(tmp_path, every_steps=2), StopAfter(8), seed=1)
    assert trained(Checkpoint(tmp_path, every_steps=2), seed=9) == whole


@pytest.mark.more
@one_backend
@pytest.mark.ranks(1, 3)
def test_resuming_is_exact_on_any_number_of_ranks(world, tmp_path):
    check_exact(world, accumulating, arrays, tmp_path, 3)


@pytest.mark.more
@one_backend
@pytest.mark.ranks(2)
def test_resuming_twice_is_exact(world, tmp_path):
    saving = [Checkpoint(tmp_path, every_steps=1), StopAfter(2)]
    with pytest.raises(Stop):
        run(world, dropout, arrays(saving), seed=1)
    check_exact(world, dropout, arrays, tmp_path, 4)


def shuffled_pipeline(callbacks: list[Any], *, seed: int = 5) -> Any:
    def fit(model: keras.Model) -> Any:
        import tensorflow as tf

        tf.random.set_seed(seed)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=4).batch(6)
        return model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)

    return fit


@pytest.mark.ranks(2)
def test_resuming_with_a_different_seed_of_a_pipeline_is_a_warning(world, tmp_path, capfd):
    callbacks = [Checkpoint(tmp_path, every_steps=1), StopAfter(3)]
    with pytest.raises(Stop):
        run(world, dropout, shuffled_pipeline(callbacks), seed=1)
    assert "global seed" not in capfd.readouterr().err
    run(world, dropout, shuffled_pipeline([Checkpoint(tmp_path)], seed=6), seed=1)
    warning = "global seed was 5 and is 6 now"
    assert (warning in capfd.readouterr().err) == world.is_chief()


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-ROWS // 6)

    def __getitem__(self, index: int) -> Any:
        return X[index * 6 : index * 6 + 6], Y[index * 6 : index * 6 + 6]


def batches(callbacks: list[Any]) -> Any:
    return lambda model: model.fit(Batches(), epochs=EPOCHS, verbose=0, callbacks=callbacks)


class Shrinking(Batches):
    """Loses two batches in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 10

    def __len__(self) -> int:
        return self.length

    def on_epoch_end(self) -> None:
        self.length -= 2


def generated(callbacks: list[Any]) -> Any:
    def batches() -> Any:
        rng = np.random.default_rng(4)
        while True:
            order = rng.permutation(ROWS)
            for start in range(0, ROWS, 6):
                yield X[order[start : start + 6]], Y[order[start : start + 6]]

    def fit(model: keras.Model) -> Any:
        return model.fit(
            batches(), steps_per_epoch=6, epochs=EPOCHS, verbose=0, callbacks=callbacks
        )

    return fit


def shrinking_batches(callbacks: list[Any]) -> Any:
    return lambda model: model.fit(Shrinking(), epochs=EPOCHS, verbose=0, callbacks=callbacks)


def long_passes(callbacks: list[Any]) -> Any:
    return plain(callbacks, batch_size=4, steps_per_epoch=4)


def of_unknown_length(callbacks: list[Any], **options: Any) -> Any:
    def fit(model: keras.Model) -> Any:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6).filter(lambda x, y: True)
        return model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks, **options)

    return fit


def validated(callbacks: list[Any]) -> Any:
    return plain(callbacks, batch_size=6, validation_split=0.2)


# Models and inputs are independent, so each is tested once. tests/trainer/data/test_begin.py tests
# passes over other kinds of data.
@every_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "fit", "stop"),
    [
        (accumulating, drawing, 8),
        pytest.param(averaged, validated, 4, marks=pytest.mark.essential),
    ],
)
def test_resuming_is_exact(world, make, fit, stop, tmp_path):
    check_resumed(world, make, fit, stop, tmp_path)


# JAX compiles for seconds, and its steps resume like those above.
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.ranks(2)
def test_resuming_is_exact_with_scaled_losses(world, tmp_path):
    check_resumed(world, scaled_loss, long_passes, 9, tmp_path)


@one_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("fit", "stop"), [(shrinking_batches, 8), (generated, 8)])
def test_resuming_is_exact_with_changing_inputs(world, fit, stop, tmp_path):
    check_resumed(world, dropout, fit, stop, tmp_path)


def check_resumed(world, make, fit, stop, tmp_path):
    check_exact(world, make, fit, tmp_path, stop)
    # A pass of nine steps ends within the third epoch of four.
    counts = {
        long_passes: (9, ROWS),
        validated: (15, 3 * 53),
        shrinking_batches: (4 + 3 + 2, (8 + 6 + 4) * 6),
    }
    check_complete(world, tmp_path, *counts.get(fit, (18, 3 * ROWS)))


@pytest.mark.ranks(2)
def test_resuming_is_exact_within_a_pipeline(world, tmp_path):
    check_exact(world, averaged, shuffled_pipeline, tmp_path, 3)
    check_complete(world, tmp_path, 18, 3 * ROWS)


def check_complete(world: Any, tmp_path: Any, step: int, samples: int) -> None:
    """Check the last checkpoints of the uninterrupted and of the resumed run."""
    for folder in (tmp_path / "whole", tmp_path) if world.is_chief() else ():
        state = Store(folder).newest().state
        assert (state["step"], state["samples"]) == (step, samples)
        assert (state["epoch"], state["place"]["epochs"]) == (EPOCHS, EPOCHS)


@pytest.mark.more
@pytest.mark.ranks(2)
def test_a_pass_of_unknown_length_may_end_within_an_epoch(world, tmp_path):
    """The pass has six steps, so it ends within the second epoch of four steps.

    The third epoch starts another pass.
    """

    def fit(callbacks: list[Any]) -> Any:
        return of_unknown_length(callbacks, steps_per_epoch=4)

    check_exact(world, dropout, fit, tmp_path, 7, every_steps=None)


class Scaled(keras.callbacks.Callback):
    """A custom callback with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.seen = np.zeros(2)

    def get_state(self) -> dict[str, Any]:
        return {"factor": self.factor, "seen": self.seen}

    def set_state(self, state: dict[str, Any]) -> None:
        self.factor, self.seen = state["factor"], state["seen"].copy()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.factor *= 0.9
        self.seen += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.05 * self.factor + 0.001 * float(self.seen.sum())


def counting() -> list[Any]:
    """Return callbacks that reduce the learning rate and restore the best weights."""
    return [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping(
            "loss", patience=2, min_delta=10.0, restore_best_weights=True
        ),
    ]


def setting() -> list[Any]:
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7), Scaled()]


@pytest.mark.more
@one_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("own", "first"), [(counting, True), (setting, False)])
def test_callback_states_are_restored(world, own, first, tmp_path):
    def fit(saving: list[Any]) -> Any:
        return plain([*saving, *own()] if first else [*own(), *saving], batch_size=6)

    check_exact(world, dropout, fit, tmp_path, 8)


@pytest.mark.ranks(2)
def test_checkpoints_dont_change_the_training(world, tmp_path):
    """Only the chief needs the directory."""
    fit = plain([Checkpoint(tmp_path / "runs" / "a", every_steps=1)], batch_size=6)
    without = outcome(*run(world, dropout, plain([], batch_size=6), seed=1))
    assert outcome(*run(world, dropout, fit, seed=1)) == without
    assert (tmp_path / "runs").exists() == world.is_chief()


@pytest.mark.more
@one_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("patience", "ranks", "epochs"), [(9, [0, 1], EPOCHS), (1, [0, 1], 2), (1, [0], 2)]
)
def test_a_complete_training_is_not_continued(world, patience, ranks, epochs, tmp_path, capfd):
    """Training may also have been completed by EarlyStopping, on all ranks or on one."""

    def fit() -> Any:
        stopping = keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=10.0)
        own = [stopping] if world.rank() in ranks else []
        return plain([Checkpoint(tmp_path), *own], batch_size=6)

    model, _ = run(world, averaged, fit(), seed=1)
    weights = [np.asarray(w) for w in model.get_weights()]
    assert "nothing is left to train" not in capfd.readouterr().err
    again, history = run(world, averaged, fit(), seed=2)
    assert ("nothing is left to train" in capfd.readouterr().err) == world.is_chief()
    assert history.epoch == list(range(epochs))
    for one, other in zip(weights, again.get_weights()):
        np.testing.assert_array_equal(one, other)


@pytest.mark.more
@pytest.mark.ranks(2)
def test_the_model_is_exported(world, tmp_path):
    path = tmp_path / "models" / "last.keras"
    # The second time nothing is left to train, as after a kill between checkpoint and export.
    for _ in range(2):
        checkpoint = Checkpoint(tmp_path / "runs", export=path)
        model, _ = run(world, dropout, plain([checkpoint], batch_size=6), seed=1)
        assert path.exists() == world.is_chief()
        if world.is_chief():
            exported = keras.models.load_model(path)
            for one, other in zip(model.get_weights(), exported.get_weights()):
                np.testing.assert_array_equal(one, other)
            assert [file.name for file in path.parent.iterdir()] == ["last.keras"]
            path.unlink()


@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.ranks(2)
def test_all_ranks_save_and_exit_after_a_signal_to_one(world, keras_backend, tmp_path):
    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0 and world.rank() == world.size() - 1:
                os.kill(os.getpid(), number)

    undisturbed = plain([Checkpoint(tmp_path / "whole")], batch_size=6)
    whole = outcome(*run(world, dropout, undisturbed, seed=1))
    # Torch compiles nothing, so it runs all of them.
    warnings = (signal.SIGUSR1, signal.SIGUSR2) if keras_backend == "torch" else ()
    for number in (signal.SIGTERM, *warnings):
        folder = tmp_path / number.name
        before = signal.getsignal(number)
        fit = plain([Checkpoint(folder, every_steps=1), Kill()], batch_size=6)
        with pytest.raises(world.Preempted) as ended:
            run(world, dropout, fit, seed=1)
        assert (ended.value.code, ended.value.signal) == (75, number)
        # A repeated warning doesn't kill the process.
        ignored = number != signal.SIGTERM and before == signal.SIG_DFL
        assert signal.getsignal(number) == (signal.SIG_IGN if ignored else before)
        if world.is_chief():
            steps = -(-ROWS // (6 * world.size()))
            assert saved_steps(folder)[-1] == steps + 1
        if number == signal.SIGTERM:
            resumed = run(world, dropout, plain([Checkpoint(folder)], batch_size=6), seed=2)
            assert outcome(*resumed) == whole


@pytest.mark.more
@one_backend
@pytest.mark.ranks(2)
def test_a_validation_is_repeated_after_a_signal(world, tmp_path):
    class Kill(keras.callbacks.Callback):
        begun = ended = 0

        def on_test_begin(self, logs: Any = None) -> None:
            self.begun += 1

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.05)  # a second or more in total; ranks synchronize twice a second
            if (self.begun, batch, world.rank()) == (2, 1, world.size() - 1):
                os.kill(os.getpid(), signal.SIGUSR1)

        def on_test_end(self, logs: Any = None) -> None:
            self.ended += 1

    def fit(name: str, *others: Any) -> Any:
        options = {"validation_data": (X, Y), "validation_batch_size": 1, "batch_size": 6}
        return plain([Checkpoint(tmp_path / name), *others], **options)

    whole = outcome(*run(world, accumulating, fit("whole"), seed=1))
    kill = Kill()
    with pytest.raises(world.Preempted):
        run(world, accumulating, fit("runs", kill), seed=1)
    assert (kill.begun, kill.ended) == (2, 1)
    resumed = run(world, accumulating, fit("runs"), seed=2)
    assert outcome(*resumed) == whole


@one_backend
@pytest.mark.ranks(2)
def test_a_checkpoint_of_a_different_model_is_an_error_on_every_rank(world, tmp_path):
    run(world, dropout, plain([Checkpoint(tmp_path)], batch_size=6), seed=1)

    def wider() -> keras.Model:
        return model_of([keras.layers.Dense(9)])

    with pytest.raises(world.CheckpointError, match=r"must be float32 \(6, 9\), got float32"):
        run(world, wider, plain([Checkpoint(tmp_path)], batch_size=6), seed=1)


@one_backend
@pytest.mark.ranks(2)
def test_resuming_within_an_epoch_with_a_different_kind_of_input_is_an_error(world, tmp_path):
    fit = plain([Checkpoint(tmp_path, every_steps=2), StopAfter(3)], batch_size=6)
    with pytest.raises(Stop):
        run(world, dropout, fit, seed=1)
    with pytest.raises(world.CheckpointError, match=r"into samples.*into batches"):
        run(world, dropout, batches([Checkpoint(tmp_path)]), seed=1)


@pytest.mark.ranks(1)
def test_a_model_that_is_not_distributed_is_an_error(world, tmp_path):
    with pytest.raises(world.ModelError, match=r"hvdtrain.distribute\(model\)"):
        dropout().fit(X, Y, verbose=0, callbacks=[Checkpoint(tmp_path)])


@one_backend
@pytest.mark.ranks(2)
def test_two_checkpoint_callbacks_are_an_error(world, tmp_path):
    two = [Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b")]
    with pytest.raises(world.ModelError, match=r"one hvdtrain\.Checkpoint callback, got 2"):
        run(world, dropout, plain(two, batch_size=6), seed=1)
