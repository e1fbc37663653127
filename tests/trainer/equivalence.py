"""Comparisons of training on N ranks with training in one process."""

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

JOINT_BATCH = 12  # divisible by 2, 3 and 4 ranks
STEPS = 20
TOLERANCE = 1e-5

REFERENCES = "HVDTRAIN_TEST_REFERENCES"
if REFERENCES not in os.environ:
    # Created by the process that collects the tests, and inherited by its MPI jobs.
    _folder = tempfile.TemporaryDirectory(prefix="hvdtrain-references-")
    os.environ[REFERENCES] = _folder.name


def branches(case: str) -> tuple[str, ...]:
    """Return the parts of the model. They share only the optimizer and are traced together."""
    # XLA can't compile synchronized BatchNormalization.
    return ("dense", "embedding") if case == "jit" else ("dense", "embedding", "conv")


def build(
    optimizer: str, case: str, dtype: str = "float32", *, synchronized: bool = False
) -> keras.Model:
    """Return the compiled model. It has the same weights in each call."""
    # Resets the counters in layer names. Collecting garbage would take long.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    ends = {name: _branch(name, dtype) for name in branches(case)}
    model = keras.Model(
        {name: start for name, (start, _) in ends.items()},
        {name: end for name, (_, end) in ends.items()},
    )
    # The model was built without it, because Keras supports it on TensorFlow only.
    if synchronized and "conv" in ends:
        model.get_layer("normalization").synchronized = True
    model.compile(
        optimizer=_optimizer(optimizer, 2 if case == "accumulation" else None),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype),
        **{
            "weighted_metrics" if case == "sample_weight" else "metrics": (
                dict.fromkeys(ends, "accuracy")
            )
        },
        steps_per_execution=4 if case == "steps_per_execution" else 1,
        jit_compile=case == "jit" or keras.backend.backend() == "jax",
    )
    _create_variables(model, case)
    return model


def _create_variables(model: keras.Model, case: str) -> None:
    """Create the variables of losses, metrics and the optimizer, so ``fit`` traces only once."""
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
    # No bias before BatchNorm: its gradient is zero up to rounding, which Adam would amplify.
    x = layers.Conv2D(4, 3, use_bias=False, dtype=dtype, name="kernel")(start)
    x = layers.BatchNormalization(momentum=0.9, dtype=dtype, name="normalization")(x)
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
    """Return arguments of ``fit`` for at least ``STEPS`` steps."""
    rng = np.random.default_rng(11)
    # Two rows in the last joint batch, which three ranks or more can't share.
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
    """Train, and return the history."""
    history = model.fit(**arguments, batch_size=batch_size, shuffle=False, verbose=0)
    return history.history


def weights(model: keras.Model) -> list[np.ndarray]:
    """Return the weights and the optimizer state, without random seeds."""
    variables = [*model.weights, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def distance(model: keras.Model, other: list[np.ndarray]) -> float:
    """Return the largest difference of weights, relative to the largest value of the variable."""
    return max(
        float(np.max(np.abs(one - two)) / max(np.max(np.abs(two)), 1e-30))
        for one, two in zip(weights(model), other, strict=True)
    )


def check_close(found: Any, expected: Any, name: str = "") -> None:
    """Check that results, or lists and dicts of results, equal those of one process.

    A prediction may be close to 0, so differences are relative to the largest value of an array.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            check_close(found[key], values, f"{name} {key}")
    elif isinstance(expected, list) and any(isinstance(entry, np.ndarray) for entry in expected):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_close(one, other, f"{name} {index}")
    else:
        sizes = np.abs(np.asarray(expected, np.float64))
        largest = np.max(sizes, initial=0.0, where=np.isfinite(sizes))
        np.testing.assert_allclose(found, expected, 0, TOLERANCE * largest, err_msg=name)


def alike(model: keras.Model) -> bool:
    """Return whether the weights and the optimizer state are bitwise equal on all ranks."""
    # Adding 0 makes zeros positive: torch resets accumulated gradients by multiplying them by 0.
    arrays = [array + 0 for array in weights(model)]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return len(set(state.collectives().allgather_object(digest, name="weights"))) == 1


def from_chief(value: Any) -> Any:
    """Return the chief's value on every rank."""
    return state.collectives().broadcast_object(value, name="reference", codec="pickle")


def train_alone(
    optimizer: str, case: str, dtype: str
) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    """Train a plain Keras model on the joint batches, and return its weights and history.

    The results are stored for the rest of the test run, because they don't depend on the ranks.
    """
    path = (
        Path(os.environ[REFERENCES]) / f"{keras.backend.backend()}-{optimizer}-{case}-{dtype}.npz"
    )
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
    """Train on all ranks, and on the chief alone.

    Returns:
        The model trained on all ranks, the weights trained alone, and both histories.
    """
    reference, alone = from_chief(
        train_alone(optimizer, case, dtype) if hvdtrain.is_chief() else None
    )
    together = build(optimizer, case, dtype, synchronized=True)
    hvdtrain.distribute(together)
    joint = fit(together, data(case), JOINT_BATCH // hvdtrain.size())
    return together, reference, joint, alone
