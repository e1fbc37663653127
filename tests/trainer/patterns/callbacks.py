"""Examples from the guides on callbacks, saving and the API."""

from __future__ import annotations

import csv
import itertools
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain
from hvdtrain import world as job
from tests.trainer.features import JOINT_BATCH, X, Y, classifier
from tests.trainer.patterns.pattern import WEIGHTS, Pattern, batches, fit, validated


class Recorder(keras.callbacks.Callback):
    """Reads the logs of epochs, sets the learning rate and stops, as in the guide on callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen += [logs["loss"], logs["val_loss"]]
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5
        if epoch == 2:
            self.model.stop_training = True


def _with_callbacks(model: keras.Model, size: int) -> Any:
    recorder = Recorder()
    callbacks = [
        recorder,
        keras.callbacks.LambdaCallback(on_train_begin=lambda logs: None),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.TerminateOnNaN(),
    ]
    history = fit(callbacks=callbacks, epochs=5, validation_split=0.25)(model, size)
    return {"seen": recorder.seen, **history}


def _swapped(model: keras.Model, size: int) -> Any:
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    return fit(callbacks=callbacks, **validated)(model, size)


def _pipeline(model: keras.Model, size: int) -> Any:
    data = batches(size, X, Y, WEIGHTS)
    options = {"validation_data": data, "validation_freq": 2, "epochs": 3, "verbose": 0}
    return model.fit(data, shuffle=False, **options).history


def _saved(model: keras.Model, size: int) -> Any:
    """Continue on every rank with the model that the chief's callbacks saved."""
    together = size < JOINT_BATCH
    with tempfile.TemporaryDirectory(prefix="patterns-") as own:
        if not together:
            return _saved_in(Path(own), model, size)
        shared = job.collectives().broadcast_object(own, name="test")
        results = _saved_in(Path(shared), model, size)
        job.collectives().barrier(name="test")  # other ranks may still read the chief's folder
    return results


def _saved_in(folder: Path, model: keras.Model, size: int) -> Any:
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.BackupAndRestore(folder / "backup"),
    ]
    if keras.backend.backend() == "tensorflow":  # the callback needs TensorFlow
        logs = folder / "logs"
        callbacks += [keras.callbacks.TensorBoard(logs, histogram_freq=1, update_freq="batch")]
    before = fit(callbacks=callbacks, **validated)(model, size)
    again = keras.models.load_model(folder / "best.keras")
    if size < JOINT_BATCH:
        hvdtrain.distribute(again)
    after = fit(**validated)(again, size)
    model.load_weights(folder / "1.weights.h5")
    results = {name: [*values, *after[name]] for name, values in before.items()}
    with open(folder / "log.csv") as file:
        results["log"] = [float(row["loss"]) for row in csv.DictReader(file)]
    return results


class BestWeights(keras.callbacks.Callback):
    """Restores the best weights, reads batches, predicts and stops, as in the guide."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.best = np.inf
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += int("loss" in logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += int("loss" in logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen += [float(np.sum(self.model.predict(X[:7], verbose=0)))]
        if logs["loss"] < self.best and epoch < 2:
            self.best, self.weights = logs["loss"], self.model.get_weights()
        else:
            self.model.stop_training = True
            self.model.set_weights(self.weights)


def _kept(model: keras.Model, size: int) -> Any:
    best = BestWeights()
    history = fit(callbacks=[best], epochs=6, **validated)(model, size)
    return {"seen": best.seen, "batches": best.batches, **history}


def _steps(model: keras.Model, size: int) -> Any:
    """Train steps of one endless pass, and validate on a part of the data."""
    data = batches(size, X[:48], Y[:48])
    options = {"steps_per_epoch": 3, "epochs": 3, "validation_steps": 2, "verbose": 0}
    return model.fit(_endless(data), validation_data=data, **options).history


def _endless(data: Any) -> Any:
    if hasattr(data, "repeat"):
        return data.repeat()
    return (tuple(batch) for _ in itertools.count() for batch in data)


def _multi_optimizer() -> keras.Model:
    kernels = keras.optimizers.Muon(0.01)
    others = keras.optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2)
    choose = lambda variable: kernels if variable.ndim == 2 else others  # noqa: E731
    return classifier(optimizer=keras.optimizers.MultiOptimizer(choose))


def _decaying() -> keras.Model:
    optimizer = keras.optimizers.AdamW(0.01, clipvalue=0.02, loss_scale_factor=8.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return classifier(optimizer=optimizer)


CALLBACKS: dict[str, Pattern] = {
    "a pipeline with weights": Pattern(
        lambda: classifier(weighted_metrics=["accuracy"]), _pipeline
    ),
    "steps_per_epoch and validation_steps": Pattern(classifier, _steps),
    "validation_split, callbacks, early stopping": Pattern(classifier, _with_callbacks, often=True),
    "batches seen, weights kept and set": Pattern(classifier, _kept),
    "files of callbacks, load_model and fit again": Pattern(
        lambda: classifier(optimizer=keras.optimizers.Adam(0.01)), _saved
    ),
    "initial_epoch and class weights": Pattern(
        classifier,
        fit(epochs=4, initial_epoch=2, class_weight={0: 1.0, 1: 2.0, 2: 0.5}),
        often=True,
    ),
    "moving averages swapped in": Pattern(
        lambda: classifier(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)),
        _swapped,
    ),
    "LossScaleOptimizer with clipping": Pattern(
        lambda: classifier(
            optimizer=keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01, global_clipnorm=0.1), initial_scale=8.0
            )
        ),
        fit(),
    ),
    "optimizers by variable, of new kinds": Pattern(_multi_optimizer, fit(), since=(3, 15)),
    "scaled losses, clipped values, no decay of biases": Pattern(_decaying, fit()),
}
