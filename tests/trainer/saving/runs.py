"""Trainings that are interrupted and resumed, and their results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdtrain.trainer.rank_random import seed_generators
from hvdtrain.trainer.variables import array_of

ROWS = 67
X = np.random.default_rng(2).normal(size=(ROWS, 6)).astype("float32")
Y = np.random.default_rng(3).integers(0, 3, ROWS)


class Stop(Exception):
    """Interrupts a training on every rank after the same step."""


class StopAfter(keras.callbacks.Callback):
    """Interrupts training after ``steps`` steps of this ``fit``."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            raise Stop


class Draws(keras.callbacks.Callback):
    """Makes training depend on every global random generator."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        noise = random.random() + random.gauss(0, 1) + np.random.normal() + np.random.rand()
        noise += float(keras.ops.convert_to_numpy(keras.random.uniform([])))
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            noise += float(tf.random.uniform([]))
        elif keras.backend.backend() == "torch":
            import torch

            noise += float(torch.rand([]))
        self.model.optimizer.learning_rate = 0.01 + 0.001 * noise


def model_of(layers: list[Any], **options: Any) -> keras.Model:
    """Return a compiled model."""
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    options.setdefault("optimizer", keras.optimizers.Adam(0.01))
    options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options.setdefault("metrics", ["accuracy"])
    model.compile(**options)
    return model


def outcome(model: keras.Model, history: Any) -> dict[str, Any]:
    """Return the state of a training for a bitwise comparison."""
    seeds = {id(generator.state) for generator in seed_generators(model)}
    return {
        "variables": [
            array_of(variable).tobytes().hex()
            for variable in [*model.variables, *model.optimizer.variables]
            if id(variable) not in seeds
        ],
        "seeds": [array_of(g.state).tolist() for g in seed_generators(model)],
        "epochs": history.epoch,
        "logs": {name: [float(v) for v in values] for name, values in history.history.items()},
        "drawn": [random.random(), float(np.random.rand())],
    }


def run(world: Any, make: Callable[[], keras.Model], fit: Callable[..., Any], seed: int) -> Any:
    """Create, distribute and train a model, and return it with its history."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    model = make()
    world.distribute(model)
    return model, fit(model)
