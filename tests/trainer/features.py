"""A small model and data for tests of single features."""

from typing import Any

import keras
import numpy as np

from tests.trainer.equivalence import TOLERANCE, alike, distance, from_chief, weights

JOINT_BATCH = 12
ROWS = JOINT_BATCH * 4 + 5
rng = np.random.default_rng(2)
X = rng.normal(size=(ROWS, 6)).astype("float32")
Y = rng.integers(0, 3, ROWS)


def classifier(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    options.setdefault("optimizer", keras.optimizers.SGD(0.1))
    options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(**options)
    return model


def compare(hvdtrain, make, train) -> keras.Model:
    """Train ``make()`` on the chief alone and on all ranks, and compare the weights."""
    alone = make()
    # Running these few steps eagerly is faster than tracing them.
    alone.jit_compile, alone.run_eagerly = False, True
    if hvdtrain.is_chief():
        train(alone, JOINT_BATCH)
    reference = from_chief(weights(alone))
    together = make()
    hvdtrain.distribute(together)
    train(together, JOINT_BATCH // hvdtrain.size())
    assert alike(together)
    assert distance(together, reference) <= TOLERANCE
    return together


def train_arrays(model: keras.Model, batch_size: int, **options: Any) -> None:
    model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **options)
