"""Training with ``-W error``, which turns warnings into errors."""

from __future__ import annotations

import pytest

SCRIPT = """
import warnings

warnings.simplefilter("error")
import keras
import numpy as np

import hvdtrain

hvdtrain.init()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).random((48, 8)).astype("float32")
y = x.sum(1, keepdims=True)
layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((8,)), *layers])
model.compile(keras.optimizers.SGD(hvdtrain.scale_learning_rate(0.01)), "mse", metrics=["mae"])
hvdtrain.distribute(model)
callbacks = [
    hvdtrain.Checkpoint("checkpoints", every_steps=2),
    hvdtrain.StepLog(),
    hvdtrain.WarmUp(initial=0.001, epochs=1),
]
model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y), callbacks=callbacks)
model.evaluate(x, y, verbose=0)
assert model.predict(x, verbose=0).shape == (48, 1)
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("mode", "ranks"), [("allreduce", 2), ("local-sgd", 2), ("async-ps", 3)])
def test_training_raises_no_warnings(launch, mode, ranks):
    done = launch(ranks, SCRIPT, env={"HVDTRAIN_MODE": mode}, timeout_s=100)
    assert done.returncode == 0, done
