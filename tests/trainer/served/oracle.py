"""Trains models in many ways on any number of ranks, and saves the results.

Run it with ``python oracle.py FOLDER [CASE ...]``. After each case, every rank compares its weights
with the chief's, and the chief writes the weights and the optimizer's state to ``FOLDER/CASE.npz``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain
from hvdtrain import world
from tests.trainer.own_steps import OwnStep

JOINT_BATCH = 12

Train = Callable[[keras.Model, dict[str, Any]], None]
optimizers = keras.optimizers


def main(folder: Path, *chosen: str) -> None:
    hvdtrain.init()
    keras.config.set_floatx("float64")
    for case in chosen or CASES:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = CASES[case]()
        hvdtrain.distribute(model)
        size = JOINT_BATCH // hvdtrain.size()
        history = {}
        for epochs in (1, 2):
            callbacks = _callbacks(case, folder / "checkpoints" / case / f"{epochs}")
            arguments = {**_data(case), "callbacks": callbacks, "epochs": epochs}
            ended = model.fit(**arguments, batch_size=size, shuffle=False, verbose=0)
            history = ended.history
        relation = "equals" if _like_chief(model) else "differs from"
        print(f"{case}: rank {hvdtrain.rank()} {relation} the chief")
        if hvdtrain.is_chief():
            validated = [np.array(v) for name, v in history.items() if name.startswith("val_")]
            np.savez(folder / f"{case}.npz", *_state(model), *validated)


def _like_chief(model: keras.Model) -> bool:
    """Return whether this rank has the chief's weights. All ranks must call this."""
    broadcast = world.collectives().broadcast
    values = [np.asarray(variable.numpy()) for variable in model.weights]
    chiefs = [broadcast(value.copy(), name="the chief's") for value in values]
    return all(np.array_equal(*pair) for pair in zip(values, chiefs))


def _state(model: keras.Model) -> list[np.ndarray]:
    """Return weights and the optimizer's state, without accumulated gradients."""
    waiting = {id(v) for v in getattr(model.optimizer, "_accumulated_gradients", ())}
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(v.numpy()) for v in variables if id(v) not in waiting]


def _data(case: str) -> dict[str, Any]:
    rng = np.random.default_rng(11)
    # One worker has fewer rows of the last joint batch than the other, or none.
    rows = JOINT_BATCH * 4 + (1 if case.endswith("uneven") else 5)
    x = rng.normal(size=(rows, 6))
    if case == "embedding":
        x = rng.integers(0, 20, (rows, 5))
    elif case == "embedding, rows once":
        x = np.arange(rows * 5).reshape(rows, 5) % (JOINT_BATCH * 5)
    arguments = {"x": x, "y": rng.integers(0, 3, rows)}
    if case == "sample_weight":
        arguments["sample_weight"] = rng.random(rows)
    elif case.startswith("averages"):
        arguments["validation_data"] = (rng.normal(size=(7, 6)), rng.integers(0, 3, 7))
    return arguments


def _callbacks(case: str, folder: Path) -> list[keras.callbacks.Callback]:
    if case == "averages":
        return [keras.callbacks.SwapEMAWeights()]
    if case == "averages, swapped on epoch":
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), hvdtrain.Checkpoint(folder)]
    return []


def _dense(optimizer: Any, **options: Any) -> keras.Model:
    layers = [keras.Input((6,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(3)]
    return _compiled(keras.Sequential(layers), optimizer, **options)


def _embedding(optimizer: Any) -> keras.Model:
    layers = [
        keras.Input((5,), dtype="int32"),
        keras.layers.Embedding(JOINT_BATCH * 5, 6),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3),
    ]
    return _compiled(keras.Sequential(layers), optimizer)


def _own_step() -> keras.Model:
    model = OwnStep()
    model(np.zeros((1, 6)))
    return _compiled(model, optimizers.SGD(0.05), metrics=None)


def _compiled(model: keras.Model, optimizer: Any, **options: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options.setdefault("metrics", ["accuracy"])
    model.compile(optimizer, loss, **options)
    return model


def _decaying(rate: float) -> Any:
    return optimizers.schedules.ExponentialDecay(rate, 3, 0.8)


CASES: Mapping[str, Callable[[], keras.Model]] = {
    "schedule, uneven": lambda: _dense(optimizers.Adam(_decaying(0.01))),
    "accumulation, uneven": lambda: _dense(
        optimizers.SGD(_decaying(0.1), momentum=0.5, gradient_accumulation_steps=3)
    ),
    "clip and decay": lambda: _dense(
        optimizers.AdamW(0.01, weight_decay=0.05, clipvalue=0.01), steps_per_execution=2
    ),
    "clipnorm": lambda: _dense(optimizers.RMSprop(0.01, clipnorm=0.05)),
    "embedding": lambda: _embedding(optimizers.SGD(0.1, momentum=0.5)),
    "embedding, rows once": lambda: _embedding(optimizers.Adam(0.01)),
    "sample_weight": lambda: _dense(optimizers.Adagrad(0.05), jit_compile=True),
    "own_step": _own_step,
    "averages": lambda: _dense(optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)),
    "averages, swapped on epoch": lambda: _dense(
        optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)
    ),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
