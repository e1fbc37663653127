"""N ranks against one process: the same model, data and steps, and what came of them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain import world as state

__all__ = ["alike", "distance", "from_chief", "train_both", "weights"]

JOINT_BATCH = 12  # rows of all ranks together: divides by 2, 3 and 4
STEPS = 20

REFERENCES = "HVDTRAIN_TEST_REFERENCES"
if REFERENCES not in os.environ:
    # Made by the process that collects the tests; those of its MPI jobs inherit it.
    _folder = tempfile.TemporaryDirectory(prefix="hvdtrain-references-")
    os.environ[REFERENCES] = _folder.name


def branches(case: str) -> tuple[str, ...]:
    """Three models in one, with an output and a loss each, which saves most of the tracing.

    They share nothing but the optimizer. XLA can't compile synchronized BatchNormalization.
    """
    return ("dense", "embedding") if case == "jit" else ("dense", "embedding", "conv")


def build(optimizer: str, case: str, dtype: str = "float32") -> keras.Model:
    """The compiled model; the same weights at each call."""
    # Or the names of layers would tell how many came before. Collecting garbage takes long.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    ends = {name: _branch(name, dtype) for name in branches(case)}
    model = keras.Model(
        {name: start for name, (start, _) in ends.items()},
        {name: end for name, (_, end) in ends.items()},
    )
    model.compile(
        optimizer=_optimizer(optimizer, 2 if case == "accumulation" else None),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype),
        **{
            "weighted_metrics" if case == "sample_weight" else "metrics": (
                dict.fromkeys(ends, "accuracy")
            )
        },
        steps_per_execution=4 if case == "steps_per_execution" else 1,
        jit_compile=case == "jit",
    )
    _create_variables(model, case)
    return model


def _create_variables(model: keras.Model, case: str) -> None:
    """Those of losses, metrics and optimizer: a function that creates any is traced twice."""
    arguments = data(case)
    x = {name: rows[:1] for name, rows in arguments["x"].items()}
    y = {name: labels[:1] for name, labels in arguments["y"].items()}
    weight = arguments["sample_weight"][:1] if "sample_weight" in arguments else None
    outputs = model(x)
    model.compute_loss(x, y, outputs, weight)
    model.compute_metrics(x, y, outputs, weight)
    model.reset_metrics()
    model.optimizer.build(model.trainable_variables)


def _branch(name: str, dtype: str) -> tuple[Any, Any]:
    layers = keras.layers
    regularizer = keras.regularizers.L2(0.01)
    head = layers.Dense(3, dtype=dtype, kernel_regularizer=regularizer, name=f"{name}_head")
    if name == "dense":
        start = keras.Input((6,), name=name)
        return start, head(layers.Dense(8, "tanh", dtype=dtype, name="hidden")(start))
    if name == "embedding":
        start = keras.Input((5,), dtype="int32", name=name)
        rows = layers.Embedding(20, 6, dtype=dtype, name="rows")(start)
        return start, head(layers.GlobalAveragePooling1D(dtype=dtype)(rows))
    start = keras.Input((6, 6, 2), name=name)
    # A bias before BatchNorm has a zero gradient; what rounding leaves of it Adam blows up.
    x = layers.Conv2D(4, 3, use_bias=False, dtype=dtype, name="kernel")(start)
    x = layers.BatchNormalization(synchronized=True, momentum=0.9, dtype=dtype)(x)
    x = layers.GlobalAveragePooling2D(dtype=dtype)(layers.ReLU(dtype=dtype)(x))
    return start, head(x)


def _optimizer(name: str, accumulation_steps: int | None) -> keras.optimizers.Optimizer:
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation_steps}
    if name == "sgd":
        return keras.optimizers.SGD(0.05, **options)
    if name == "momentum":
        return keras.optimizers.SGD(0.05, momentum=0.9, **options)
    if name == "adam":
        return keras.optimizers.Adam(0.01, **options)
    return keras.optimizers.AdamW(
        0.01, weight_decay=0.01, clipnorm=0.1, use_ema=True, ema_momentum=0.9, **options
    )


def data(case: str) -> dict[str, Any]:
    """Arguments of ``fit``: x, y, perhaps weights; at least ``STEPS`` steps in all."""
    rng = np.random.default_rng(11)
    # Two rows in the last joint batch: with three ranks or more some have none.
    rows = JOINT_BATCH * 6 + 2 if case == "uneven" else JOINT_BATCH * STEPS
    x = {
        "dense": rng.normal(size=(rows, 6)).astype("float32"),
        "embedding": rng.integers(0, 20, (rows, 5)).astype("int32"),
        "conv": rng.normal(size=(rows, 6, 6, 2)).astype("float32"),
    }
    y = rng.integers(0, 3, rows)
    arguments: dict[str, Any] = {
        "x": {name: x[name] for name in branches(case)},
        "y": dict.fromkeys(branches(case), y),
        "epochs": 3 if case == "uneven" else 1,
    }
    if case == "sample_weight":
        arguments["sample_weight"] = rng.random(rows).astype("float32")
    return arguments


def fit(model: keras.Model, arguments: dict[str, Any], batch_size: int) -> dict[str, list[float]]:
    """Train; the history."""
    history = model.fit(**arguments, batch_size=batch_size, shuffle=False, verbose=0)
    return history.history


def weights(model: keras.Model) -> list[np.ndarray]:
    """Weights and optimizer state, without random seeds."""
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(variable.numpy()) for variable in variables]


def distance(model: keras.Model, other: list[np.ndarray]) -> float:
    """The largest difference of any weight, relative to the largest value of its variable."""
    differences = [
        float(np.max(np.abs(mine - theirs)) / max(np.max(np.abs(theirs)), 1e-30))
        for mine, theirs in zip(weights(model), other)
    ]
    return max(differences)


def alike(model: keras.Model) -> bool:
    """Whether all ranks hold bitwise equal weights and optimizer state."""
    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights(model))).hexdigest()
    return len(set(state.collectives().allgather_object(digest, name="weights"))) == 1


def from_chief(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The chief's arrays on every rank."""
    collectives = state.collectives()
    return [collectives.broadcast(array, name="reference") for array in arrays]


def _from_chief(arrays: list[np.ndarray], index: int) -> np.ndarray:
    """The chief's array of this index on every rank; the others don't know its shape yet."""
    collectives = state.collectives()
    mine = arrays[index] if arrays else np.empty(0, np.uint8)
    kind = collectives.broadcast_object([mine.dtype.name, mine.shape], name="kind")
    if collectives.rank > 0:
        mine = np.empty(kind[1], kind[0])
    return collectives.broadcast(mine, name="reference")


def train_alone(
    optimizer: str, case: str, dtype: str
) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    """Weights and history of a plain Keras model on the joint batches, in this process.

    They don't depend on the number of ranks, so they are kept for the rest of the test run.
    """
    path = Path(os.environ[REFERENCES]) / f"{optimizer}-{case}-{dtype}.npz"
    if not path.exists():
        model = build(optimizer, case, dtype)
        history = fit(model, data(case), JOINT_BATCH)
        np.savez(path, *weights(model), history=json.dumps(history))
    with np.load(path) as kept:
        arrays = [kept[f"arr_{index}"] for index in range(len(kept.files) - 1)]
        return arrays, json.loads(str(kept["history"]))


def train_both(
    hvdtrain: Any, optimizer: str, case: str, dtype: str = "float32"
) -> tuple[keras.Model, list[np.ndarray], dict[str, list[float]], dict[str, list[float]]]:
    """The model trained on all ranks; weights of one process; both histories.

    The single process is the chief, which trains a plain Keras model on the joint batches.
    """
    arguments = data(case)
    reference, alone = train_alone(optimizer, case, dtype) if hvdtrain.is_chief() else ([], {})
    count = state.collectives().broadcast_object(len(reference), name="references")
    reference = [_from_chief(reference, index) for index in range(count)]
    alone = state.collectives().broadcast_object(alone, name="history")
    together = build(optimizer, case, dtype)
    hvdtrain.distribute(together)
    joint = fit(together, arguments, JOINT_BATCH // hvdtrain.size())
    return together, reference, joint, alone
