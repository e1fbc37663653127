"""The class of patterns, and the models and data that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from hvdtrain.trainer.model_parts import optimizer_variables
from tests.trainer.features import ROWS, X, Y

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
NOISE = np.random.default_rng(8).normal(size=(ROWS, 2)).astype("float32")
TOKENS = np.random.default_rng(9).integers(0, 7, (ROWS, 5))  # zeros are masked
SEQUENCES = np.random.default_rng(10).normal(size=(ROWS, 5, 3)).astype("float32")
WEIGHTS = np.where(Y == 1, 2.0, 0.5).astype("float32")
validated = {"validation_data": (X[:17], Y[:17])}

Train = Callable[[keras.Model, int], Any]


class Pattern(NamedTuple):
    """One way to train."""

    make: Callable[[], keras.Model]  # returns the compiled model
    train: Train  # takes the model and a batch size, and returns the results that a user sees
    # Whether ``make test-keras`` runs the pattern. ``make test-all`` runs all patterns.
    often: bool = False
    since: tuple[int, int] = (3, 14)  # the first version of Keras that supports it
    eager: bool = True  # whether the reference may run eagerly, which is faster than tracing
    # the backends of Keras with which the pattern works in one process
    backends: tuple[str, ...] = ("tensorflow", "torch", "jax")
    presharded: bool = False  # whether ``train`` passes each rank its own part of the data


def state(model: keras.Model) -> list[np.ndarray]:
    """Return weights and the state of all optimizers, without random seeds."""
    variables = [*model.weights, *optimizer_variables(model)]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def outcome(results: Any) -> dict[str, np.ndarray]:
    """Return the results of a training as arrays by name."""
    if not isinstance(results, dict):
        return {"": np.asarray(results, np.float64)}
    return {name: np.asarray(values, np.float64) for name, values in sorted(results.items())}


def fit(*arrays: Any, **options: Any) -> Train:
    """Return a training on arrays for two epochs, with a shorter last batch."""
    x, y, *rest = arrays or (X, Y)
    weights = {"sample_weight": rest[0]} if rest else {}

    def train(model: keras.Model, size: int) -> Any:
        arguments = {"epochs": 2, "shuffle": False, "verbose": 0, **weights, **options}
        return model.fit(x, y, batch_size=size, **arguments).history

    return train


class Batches(keras.utils.PyDataset):
    """Arrays in batches.

    Args:
        size: Number of rows in a batch.
        arrays: x, y and sample weights.
    """

    def __init__(self, size: int, *arrays: Any) -> None:
        super().__init__()
        self._size, self._arrays = size, arrays

    def __len__(self) -> int:
        return -(-len(keras.tree.flatten(self._arrays)[0]) // self._size)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * self._size, (index + 1) * self._size)
        return tuple(keras.tree.map_structure(lambda array: array[rows], self._arrays))


def batches(size: int, *arrays: Any) -> Any:
    """Return arrays as the pipeline that users of the backend have."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(arrays).batch(size)
    if keras.backend.backend() == "torch":
        import torch

        data = torch.utils.data.TensorDataset(*map(torch.as_tensor, arrays))
        return torch.utils.data.DataLoader(data, batch_size=size)
    return Batches(size, *arrays)


def built(model: keras.Model, x: Any = X, **options: Any) -> keras.Model:
    """Build a subclassed model by calling it, and compile it."""
    model(x[:1])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": LOSS, **options})
    return model


def stack(*parts: Any, start: Any = None, **options: Any) -> keras.Model:
    """Return a compiled Sequential. The input has six numbers per row unless ``start`` is set."""
    model = keras.Sequential([keras.Input((6,)) if start is None else start, *parts])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": LOSS, **options})
    return model


class Hits(keras.metrics.Metric):
    """A user-defined metric."""

    def __init__(self) -> None:
        super().__init__(name="hits")
        self.found = self.add_variable((), "zeros", name="found")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        hits = keras.ops.equal(keras.ops.argmax(y_pred, -1), keras.ops.cast(y_true, "int64"))
        self.found.assign_add(keras.ops.sum(keras.ops.cast(hits, self.dtype)))

    def result(self) -> Any:
        return self.found.value
