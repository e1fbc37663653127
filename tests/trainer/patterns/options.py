"""Data, optimizers and options of ``fit``, each with a model for which they matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import hvdtrain
from tests.trainer.features import JOINT_BATCH, ROWS, X, Y, classifier
from tests.trainer.patterns.pattern import LOSS, Batches, Pattern, Train, fit, stack

# The gradients of this row overflow if the loss is scaled by 2**15. It is in the last rank's part.
OVERFLOWING = X.copy()
OVERFLOWING[2 * JOINT_BATCH - 1] = 1e36
NOT_A_NUMBER = X.copy()
NOT_A_NUMBER[2 * JOINT_BATCH - 1] = np.nan


def _scaled() -> keras.Model:
    adam = keras.optimizers.Adam(0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(adam, initial_scale=2.0**15)
    return stack(keras.layers.Dense(3), optimizer=optimizer)


def _without_losses(train: Train) -> Train:
    """Compare only the weights: the loss of the row that overflows isn't finite."""

    def run(model: keras.Model, size: int) -> Any:
        train(model, size)
        return {}

    return run


def _generator(size: int, rows: int = ROWS) -> Iterator[Any]:
    for first in range(0, rows, size):
        part = slice(first, min(first + size, rows))
        yield X[part], Y[part]


def _generated(model: keras.Model, size: int) -> Any:
    """Train on generators, which can be read only once."""
    options = {"epochs": 1, "verbose": 0}
    losses = [model.fit(_generator(size, 48), **options).history["loss"] for _ in range(2)]
    return {"loss": losses, "evaluated": model.evaluate(_generator(size, 48), verbose=0)}


def _sequence(model: keras.Model, size: int) -> Any:
    data, some = Batches(size, X[:48], Y[:48]), Batches(size, X[:24], Y[:24])
    history = model.fit(data, validation_data=some, epochs=2, shuffle=False, verbose=0).history
    return {**history, "predictions": model.predict(Batches(size, X[:48]), verbose=0).ravel()}


def _pipeline(model: keras.Model, size: int) -> Any:
    """Train on pipelines of ``tf.data``, which other backends read, too."""
    import tensorflow as tf

    def read(rows: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(size)

    weights = {0: 2.0, 1: 0.5, 2: 1.0}
    return model.fit(
        read(ROWS), validation_data=read(24), class_weight=weights, epochs=2, verbose=0
    ).history


def _tensors(model: keras.Model, size: int) -> Any:
    """Train on tensors of the backend, and validate on a part of them."""
    x, y = map(keras.ops.convert_to_tensor, (X, Y))
    options = {"validation_split": 0.25, "class_weight": {0: 2.0, 1: 0.5}}
    history = model.fit(x, y, batch_size=size, shuffle=False, epochs=2, verbose=0, **options)
    return {**history.history, "predictions": model.predict(x, verbose=0).ravel()}


class WeightsOfBatches(keras.callbacks.Callback):
    """Reads and changes weights within an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        kernel = self.model.layers[-1].kernel
        self.seen += [float(np.sum(np.abs(keras.ops.convert_to_numpy(kernel))))]
        self.seen += [float(self.model.optimizer.iterations)]
        if batch == 2:
            kernel.assign(kernel * 0.5)


def _watched(model: keras.Model, size: int) -> Any:
    callback = WeightsOfBatches()
    history = fit(callbacks=[callback])(model, size)
    return {"seen": callback.seen, **history}


def _until_nan(model: keras.Model, size: int) -> Any:
    callbacks = [keras.callbacks.TerminateOnNaN()]
    history = fit(NOT_A_NUMBER, Y, callbacks=callbacks, epochs=3)(model, size)
    return {"epochs": len(history["loss"]), "steps": int(model.optimizer.iterations)}


def _sharded(model: keras.Model, size: int) -> Any:
    """Pass each rank its own rows of each joint batch."""
    rows = np.arange(ROWS)
    if size < JOINT_BATCH:
        rows = rows[rows // size % hvdtrain.size() == hvdtrain.rank()]
    history = fit(X[rows], Y[rows], validation_data=(X[rows], Y[rows]))(model, size)
    return {**history, "evaluated": model.evaluate(X[rows], Y[rows], size, verbose=0)}


def _with_metrics() -> keras.Model:
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
    weighted = [keras.metrics.SparseTopKCategoricalAccuracy(k=2)]
    return classifier(metrics=metrics, weighted_metrics=weighted)


def _with_areas() -> keras.Model:
    metrics = [keras.metrics.AUC(num_thresholds=20), keras.metrics.Recall()]
    return stack(
        keras.layers.Dense(1, "sigmoid"), loss="binary_crossentropy", metrics=[*metrics, "mae"]
    )


def _evaluated_and_predicted(model: keras.Model, size: int) -> Any:
    results = model.evaluate(X, Y, size, verbose=0, return_dict=True)
    model.reset_metrics()  # Keras 3.14 would continue with those of evaluate
    more = model.test_on_batch(X[:1], Y[:1])  # the same batch on each rank
    outputs = model.predict(X, size, verbose=0).ravel()
    return {**results, "more": more, "outputs": outputs, "few": model.predict(X[:1], verbose=0)}


_SGD = keras.optimizers.SGD
_ADAM = keras.optimizers.Adam

OPTIONS: dict[str, Pattern] = {
    "gradient accumulation": Pattern(
        lambda: classifier(optimizer=_ADAM(0.01, gradient_accumulation_steps=2, clipnorm=0.1)),
        fit(),  # an even number of steps, after which nothing is accumulated
        often=True,
    ),
    "an overflow on one rank": Pattern(_scaled, _without_losses(fit(OVERFLOWING, Y)), often=True),
    "a last step of one row": Pattern(
        lambda: classifier(optimizer=_ADAM(0.01)),
        fit(X[:49], Y[:49], validation_data=(X[:13], Y[:13])),
        often=True,
    ),
    "generators": Pattern(classifier, _generated),
    "a PyDataset": Pattern(classifier, _sequence),
    "a pipeline of tf.data": Pattern(classifier, _pipeline),
    "tensors with class weights": Pattern(classifier, _tensors),
    "weights of batches": Pattern(classifier, _watched, often=True),
    "a loss that is not a number": Pattern(classifier, _until_nan),
    "each rank's own rows": Pattern(classifier, _sharded, presharded=True),
    "several metrics": Pattern(
        _with_metrics, fit(X, Y, np.linspace(0.1, 1, ROWS), validation_data=(X[:17], Y[:17]))
    ),
    "metrics of a binary classifier": Pattern(
        _with_areas, fit(X, (Y > 0).astype("float32")[:, np.newaxis]), eager=False
    ),
    "evaluate and predict": Pattern(_with_metrics, _evaluated_and_predicted),
    "a step that updates other weights": Pattern(
        lambda: stack(keras.layers.Dense(4, trainable=False), keras.layers.Dense(3), loss=LOSS),
        fit(),
    ),
}
