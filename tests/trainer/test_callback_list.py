"""Callbacks on several ranks: only the chief writes files, and all ranks decide equally."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import world as state
from hvdtrain.errors import NonFiniteError
from hvdtrain.monitor import report
from hvdtrain.trainer.callback_list import _StandbyCallback
from hvdtrain.trainer.saving.checkpoint_callback import Checkpoint
from tests.trainer.equivalence import alike
from tests.trainer.features import X, Y, classifier
from tests.trainer.saving import runs


def linear() -> keras.Model:
    # Without ReLU, which may convert NaN to 0.
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("raises", [False, True])
def test_terminate_on_nan_stops_all_ranks_at_the_same_batch(world, raises):
    x = X[:36].copy()
    x[16] = np.nan  # in one rank's part of the second batch
    batches, ended = [], []
    callbacks = [
        keras.callbacks.TerminateOnNaN(raise_error=raises),
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: batches.append(batch),
            on_train_end=lambda logs: ended.append(True),
        ),
    ]
    model = linear()
    world.distribute(model)
    size = 12 // world.size()
    with pytest.raises(RuntimeError, match="batch 1") if raises else nullcontext():
        model.fit(x, Y[:36], batch_size=size, shuffle=False, verbose=0, callbacks=callbacks)
    assert (batches, ended) == (([0], []) if raises else ([0, 1], [True]))
    if world.size() > 1:
        model = linear()
        world.distribute(model)
        with pytest.raises(NonFiniteError):
            model.fit(x, Y[:36], batch_size=size, shuffle=False, verbose=0)


class OnPredictEnd(keras.callbacks.ModelCheckpoint):
    def on_predict_end(self, logs: Any = None) -> None:
        Path(self.filepath).touch()


@pytest.mark.ranks(2)
def test_only_the_chief_writes_files(world, tmp_path):
    model = classifier()
    world.distribute(model)
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
    ]
    model.fit(X, Y, batch_size=6, epochs=2, verbose=0, callbacks=callbacks)
    model.evaluate(X, Y, verbose=0, callbacks=[keras.callbacks.TensorBoard(tmp_path / "board")])
    model.predict(X, verbose=0, callbacks=[OnPredictEnd(tmp_path / "predicted.keras")])
    written = sorted(path.name for path in tmp_path.iterdir())
    expected = ["backup", "board", "log.csv", "model.keras", "predicted.keras"]
    assert written == (expected if world.is_chief() else [])


@pytest.mark.ranks(2)
def test_only_the_chief_prints(world, capfd):
    model = classifier()
    world.distribute(model)
    capfd.readouterr()
    model.fit(X, Y, batch_size=6, verbose=2)
    assert ("loss:" in capfd.readouterr().out) == world.is_chief()


@pytest.mark.ranks(2)
def test_a_stop_at_the_end_of_an_epoch_on_one_rank_stops_all(world):
    def stop(epoch: int, logs: Any) -> None:
        model.stop_training = world.rank() == 1

    model = classifier()
    world.distribute(model)
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=stop)]
    history = model.fit(X, Y, batch_size=6, epochs=5, verbose=0, callbacks=callbacks)
    assert history.epoch == [0]


class StopAt(keras.callbacks.Callback):
    """Stops a loop on the last rank when a hook is called with a certain number."""

    def __init__(self, hook: str, number: int, attribute: str = "stop_training") -> None:
        super().__init__()
        self.ends: list[str] = []

        def stop(n: int, logs: Any = None) -> None:
            if state.rank() == state.size() - 1 and n == number:
                setattr(self.model, attribute, True)

        setattr(self, hook, stop)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert "val_loss" in logs
        self.ends.append(f"epoch {epoch}")

    def on_train_end(self, logs: Any = None) -> None:
        self.ends.append("training")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("hook", "number", "steps"),
    [
        ("on_train_batch_end", 1, 2),
        ("on_train_batch_begin", 1, 2),
        ("on_batch_end", 1, 2),
        ("on_epoch_begin", 0, 1),
    ],
)
def test_a_stop_within_an_epoch_on_one_rank_stops_all_at_that_batch(world, hook, number, steps):
    model = classifier()
    world.distribute(model)
    stop = StopAt(hook, number)
    data = {"validation_data": (X[:20], Y[:20]), "verbose": 0}
    size = 12 // world.size()
    model.fit(X[:48], Y[:48], batch_size=size, epochs=3, callbacks=[stop], **data)
    assert stop.ends == ["epoch 0", "training"]
    assert int(model.optimizer.iterations) == steps
    assert alike(model)


@pytest.mark.ranks(2)
def test_a_stop_by_a_callback_of_one_rank_stops_all_at_that_block(world):
    model = classifier(steps_per_execution=2)
    world.distribute(model)
    callbacks = []
    if world.rank() == 1:

        def stop(batch: int, logs: Any) -> None:
            model.stop_training = batch == 3

        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    model.fit(X[:48], Y[:48], batch_size=4, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 4


@pytest.mark.ranks(1, 2)
def test_a_stop_in_an_eager_step_of_one_rank_stops_all_at_that_batch(world):
    class Stops(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            if state.rank() == state.size() - 1 and int(self.optimizer.iterations) == 2:
                self.stop_training = True
            return logs

    model = Stops([keras.Input((6,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)
    world.distribute(model)
    model.fit(X[:48], Y[:48], batch_size=12 // world.size(), verbose=0)
    assert int(model.optimizer.iterations) == 2


@pytest.mark.ranks(1, 2)
def test_a_stop_on_one_rank_stops_evaluation_and_prediction_on_all(world):
    model = classifier()
    world.distribute(model)
    size = 12 // world.size()
    stop = StopAt("on_test_batch_end", 1, "stop_evaluating")
    losses = model.evaluate(X[:48], Y[:48], batch_size=size, verbose=0, callbacks=[stop])
    first = model.evaluate(X[:24], Y[:24], batch_size=size, verbose=0)
    np.testing.assert_allclose(losses, first, rtol=1e-5)
    stop = StopAt("on_predict_batch_end", 1, "stop_predicting")
    assert len(model.predict(X[:48], batch_size=size, verbose=0, callbacks=[stop])) == 24


@pytest.mark.ranks(2)
def test_ranks_agree_after_every_batch_only_with_custom_batch_hooks(world, monkeypatch):
    engine = type(state.collectives())
    names = []
    allreduce = engine.allreduce

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        names.append(options.get("name"))
        return allreduce(self, *args, **options)

    monkeypatch.setattr(engine, "allreduce", spy)
    model = classifier()
    world.distribute(model)
    stop = keras.callbacks.EarlyStopping("loss")
    standby = _StandbyCallback(keras.callbacks.CSVLogger("unused"))  # as in elastic jobs
    callbacks = [stop, world.StepLog(), standby]
    model.fit(X[:48], Y[:48], batch_size=6, verbose=0, callbacks=callbacks)
    assert names.count("stop_training") == 1


@pytest.mark.essential
@pytest.mark.ranks(2)
def test_early_stopping_and_reduce_lr_on_plateau_decide_equally_on_all_ranks(world):
    model = classifier(optimizer=keras.optimizers.SGD(0.5))
    world.distribute(model)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5)
    history = model.fit(
        X, Y, batch_size=6, epochs=12, verbose=0, callbacks=[stop, plateau],
        validation_data=(X[:20], Y[::-1][:20]),
    )  # fmt: skip
    decisions = state.collectives().allgather_object(
        [history.epoch, stop.stopped_epoch, stop.best, history.history["learning_rate"][-1]]
    )
    assert decisions[0] == decisions[1]
    assert len(history.epoch) < 12
    assert alike(model)


@pytest.mark.ranks(2)
def test_a_backup_that_the_chief_restores_reaches_all_ranks(world, tmp_path):
    first = classifier()
    world.distribute(first)
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    first.fit(X, Y, batch_size=6, epochs=2, verbose=0, callbacks=[backup])
    second = classifier()
    world.distribute(second)
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    history = second.fit(X, Y, batch_size=6, epochs=3, verbose=0, callbacks=[backup])
    assert history.epoch == [2]
    assert alike(second)


@pytest.mark.ranks(2)
def test_callbacks_see_the_number_of_steps_when_an_epoch_begins(world):
    seen = []

    class Reads(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.params["steps"])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.params["steps"] = 99

    model = classifier()
    world.distribute(model)
    model.fit(X[:48], Y[:48], batch_size=6, epochs=2, verbose=0, callbacks=[Reads()])
    assert seen == [4, 4]


SLOW_RESTORE = """
import time
import keras
import numpy as np
import hvdtrain

class Slow(keras.callbacks.BackupAndRestore):
    def on_train_begin(self, logs=None):
        time.sleep(6)

hvdtrain.init()
transport = hvdtrain.world.collectives().transport
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hvdtrain.distribute(model)
hvdtrain.world.collectives().barrier()
transport._spin_wait._timeout_s = 3.0  # not earlier, because ranks start at different times
history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[Slow("backup")])
print("epochs", history.epoch)
"""


@pytest.mark.more
def test_ranks_wait_without_timeout_while_the_chief_restores(launch):
    done = launch(2, SLOW_RESTORE, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epochs [0]") == 2


@pytest.mark.ranks(2)
def test_logs_of_a_custom_train_step_are_weighted_by_samples(world):
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            return {"rank": keras.ops.convert_to_tensor(float(state.rank()))}

    model = Own()
    model(X[:1])
    model.compile("sgd", "mse")
    world.distribute(model)
    # The last step has 3 samples on rank 0 and 2 on rank 1.
    history = model.fit(X[:17], np.zeros(17), batch_size=6, verbose=0)
    assert history.history["rank"] == [2 / 5]


@pytest.mark.ranks(2)
def test_the_planned_steps_are_reported_even_after_resuming(world, monkeypatch, tmp_path):
    planned = []
    monkeypatch.setattr(report, "planned", planned.append)

    def fit(*callbacks: Any) -> Any:
        saving = [Checkpoint(tmp_path, every_steps=2), *callbacks]
        options = {"batch_size": 6, "epochs": 3, "verbose": 0, "callbacks": saving}
        return lambda model: model.fit(runs.X, runs.Y, **options)

    with pytest.raises(runs.Stop):
        runs.run(world, lambda: runs.model_of([]), fit(runs.StopAfter(9)), seed=1)
    runs.run(world, lambda: runs.model_of([]), fit(), seed=1)
    assert set(planned) == {18}  # three epochs of six steps
    assert len(planned) >= 18


@pytest.mark.ranks(2)
def test_all_samples_of_a_short_training_are_reported(world, monkeypatch):
    # This includes the samples since the loss was last read, which happens once a second.
    reported = []
    monkeypatch.setattr(report, "learned", lambda samples, loss: reported.append(samples))
    monkeypatch.setattr(report, "is_heard", lambda: True)
    model = linear()
    world.distribute(model)
    model.fit(X[:48], Y[:48], batch_size=12 // world.size(), epochs=2, verbose=0)
    assert reported[-1:] == ([96.0] if world.is_chief() else [])


@pytest.mark.ranks(2)
def test_a_resumed_training_reports_only_its_own_samples(world, monkeypatch, tmp_path):
    reported = []
    monkeypatch.setattr(report, "learned", lambda samples, loss: reported.append(samples))
    monkeypatch.setattr(report, "is_heard", lambda: True)

    def fit(*callbacks: Any) -> Any:
        saving = [*callbacks, Checkpoint(tmp_path, every_steps=2)]
        options = {"batch_size": 6, "epochs": 2, "verbose": 0, "callbacks": saving}
        return lambda model: model.fit(runs.X[:60], runs.Y[:60], **options)

    with pytest.raises(runs.Stop):
        runs.run(world, lambda: runs.model_of([]), fit(runs.StopAfter(3)), seed=1)
    reported.clear()
    runs.run(world, lambda: runs.model_of([]), fit(), seed=1)
    # Two of ten steps with 12 samples each were made before.
    assert reported[-1:] == ([8 * 12.0] if world.is_chief() else [])
