"""Losses of different batches, weighted so that ranks train like one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from hvdtrain import world as job
from hvdtrain.collectives.engine import Engine
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import set_mask
from hvdtrain.trainer.loss_weights import LossWeights

pytestmark = [pytest.mark.ranks(2), pytest.mark.backends("tensorflow", "torch", "jax")]

X = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [2.0, 2.0]], "float32")
Y = np.array([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0], [5.0, 1.0]], "float32")
WEIGHTS = np.array([0.5, 2.0, 1.0, 4.0], "float32")
MASK = np.array([[1, 0], [1, 1], [0, 1], [1, 0]], bool)
PARTS = [slice(0, 3), slice(3, 4)]

Loss = Callable[[Any], Any]


def gradient_of(loss: Loss) -> np.ndarray:
    """Return the gradient of a compiled loss at 1.5."""
    start = np.float32(1.5)
    if keras.backend.backend() == "jax":
        import jax

        return np.asarray(jax.jit(jax.value_and_grad(loss))(start)[1])
    if keras.backend.backend() == "torch":
        import torch

        w = torch.tensor(start, requires_grad=True)
        return torch.autograd.grad(loss(w), w)[0].cpu().numpy()
    import tensorflow as tf

    @tf.function(autograph=False)
    def gradient(w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            value = loss(w)
        return tape.gradient(value, w)

    return np.asarray(gradient(tf.constant(start)))


def loss_of(part: slice, reduction: str, masked: bool) -> Loss:
    loss = keras.losses.MeanSquaredError(reduction=reduction)

    def value(w: Any) -> Any:
        predictions = ops.convert_to_tensor(X[part]) * w
        targets = ops.convert_to_tensor(Y[part])
        if masked:
            # One value per time step, as masks of sequences have.
            predictions, targets = predictions[..., None], targets[..., None]
            set_mask(predictions, ops.convert_to_tensor(MASK[part]))
            return loss(targets, predictions)
        return loss(targets, predictions, sample_weight=ops.convert_to_tensor(WEIGHTS[part]))

    return value


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("reduction", "masked"),
    [
        ("sum_over_batch_size", False),
        ("sum_over_batch_size", True),
        ("mean_with_sample_weight", False),
        ("sum", False),
        ("sum", True),
    ],
)
def test_the_mean_of_gradients(world: Any, reduction: str, masked: bool, known: bool) -> None:
    part = PARTS[job.rank()]
    weights, rows = LossWeights(GradientReducer.of_job()), len(X[part])
    seen = []

    def weighted(w: Any) -> Any:
        with weights.joint_loss(rows, len(X) if known else None, "train") as terms:
            value = loss_of(part, reduction, masked)(w)
        seen.append(terms[0] is not None)
        return value * weights.weight(rows, len(X), sums=False)

    mean = job.collectives().allreduce(gradient_of(weighted), "average", name="gradient")
    expected = gradient_of(loss_of(slice(None), reduction, masked))
    np.testing.assert_allclose(mean, expected, rtol=1e-5)
    assert seen == [reduction != "sum" and (masked or reduction == "mean_with_sample_weight")]


def test_a_rank_without_rows(world: Any) -> None:
    weights = LossWeights(GradientReducer.of_job())
    part = [slice(None), slice(0, 1)][job.rank()]
    rows = [4, 0][job.rank()]  # the batch of rank 1 is only there for its structure

    def weighted(w: Any) -> Any:
        with weights.joint_loss(rows, 4, "train"):
            value = loss_of(part, "mean_with_sample_weight", masked=False)(w)
        return value * weights.weight(rows, 4, sums=False)

    mean = job.collectives().allreduce(gradient_of(weighted), "average", name="gradient")
    expected = gradient_of(loss_of(slice(None), "mean_with_sample_weight", masked=False))
    np.testing.assert_allclose(mean, expected, rtol=1e-5)


def test_the_weight_of_a_rank_in_an_elastic_job(world: Any, monkeypatch: Any) -> None:
    """The optimizer sends the sum of the weights of a single loss, not the number of rows."""
    sent = []
    reduce = Engine.grouped_allreduce

    def spy(self: Any, arrays: Any, *args: Any, name: str = "", **options: Any) -> Any:
        sent.extend([float(arrays[-1])] if name == "gradients" else [])
        return reduce(self, arrays, *args, name=name, **options)

    monkeypatch.setattr(Engine, "grouped_allreduce", spy)
    monkeypatch.setattr(job.collectives(), "survives_losses", True)
    part = PARTS[job.rank()]
    by_weights, by_rows = 2 * WEIGHTS[part].sum() / WEIGHTS.sum(), 2 * len(X[part]) / len(X)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    for penalty, expected in (
        (None, by_weights),
        ("l2", by_rows),  # a second loss, which is a mean over rows
    ):
        dense = keras.layers.Dense(2, kernel_regularizer=penalty)
        model = keras.Sequential([keras.Input((2,)), dense])
        model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=penalty is not None)
        world.distribute(model)
        model.train_on_batch(X[part], Y[part], WEIGHTS[part])
        assert sent.pop() == pytest.approx(expected, rel=1e-5)
