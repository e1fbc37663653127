"""Programs on torch and JAX that don't import TensorFlow, even if it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = """
import importlib.machinery
import random
import sys

attempts = []


class NoTensorFlow:
    def find_spec(self, name, *args):
        if name.partition(".")[0] == "tensorflow":
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        attempts.append(spec.name)
        raise ImportError(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, NoTensorFlow())
# The program is forked from a process that has imported hvdtrain, so import it again.
for name in [name for name in sys.modules if name.partition(".")[0] == "hvdtrain"]:
    del sys.modules[name]

import hvdtrain

hvdtrain.init()

import keras
import numpy as np

rng = np.random.default_rng(1)
x, y = rng.normal(size=(53, 6)).astype("float32"), rng.integers(0, 3, 53)
layers = [keras.Input((6,)), keras.layers.Dense(4), keras.layers.BatchNormalization()]


def train(epochs):
    random.seed(1)  # keras.utils.set_random_seed tries to import TensorFlow
    model = keras.Sequential([*layers, keras.layers.Dropout(0.1), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    hvdtrain.distribute(model)
    warm_up = hvdtrain.WarmUp(initial=0.1, epochs=1)
    callbacks = [hvdtrain.Checkpoint(sys.argv[1]), warm_up, hvdtrain.StepLog()]
    options = {"validation_data": (x, y), "verbose": 0, "callbacks": callbacks}
    return model, model.fit(x, y, batch_size=8, epochs=epochs, **options).history


train(1)
model, history = train(3)
assert len(history["loss"]) == 3
assert model.evaluate(x, y, verbose=0)[0] == model.evaluate(x, y, verbose=0)[0]
assert model.predict(x, verbose=0).shape == (53, 3)
model.train_on_batch(x[:8], y[:8])
assert not attempts, attempts
print(f"done on {keras.backend.backend()}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_training_never_imports_tensorflow(
    backend: str, python_with, mpirun, run_command, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    argv = [*python_with(backend), str(program), str(tmp_path / "checkpoints")]
    done = run_command(mpirun(2, argv), env={"KERAS_BACKEND": backend}, timeout_s=100)
    assert done.returncode == 0, done
    assert done.stdout.count(f"done on {backend}") == 2, done
    assert "resuming from the checkpoint of step 4" in done.stderr, done
