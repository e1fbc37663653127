"""Differentiable collectives on torch and JAX, and the parts of training that use them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.trainer.additive_metrics import adds_up
from hvdtrain.trainer.batch_normalization import SyncBatchNormalization
from hvdtrain.trainer.rank_random import random_by_rank

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
WEIGHT = np.random.default_rng(1).normal(size=(7, 3)).astype("float32")
ROWS = (slice(0, 2), slice(2, 7))

ops = keras.ops


def _gradient(function: Any, value: np.ndarray, backend: str) -> list[np.ndarray]:
    """Return the gradient of a function, computed eagerly and, on JAX, in a compiled function."""
    if backend == "torch":
        import torch

        variable = torch.tensor(value, requires_grad=True)
        function(variable).backward()
        return [variable.grad.numpy()]
    import jax

    gradient = jax.grad(function)
    return [np.asarray(gradient(value)), np.asarray(jax.jit(gradient)(value))]


@pytest.mark.ranks(2)
@pytest.mark.backends("torch", "jax")
def test_normalization_over_all_ranks_has_the_gradient_of_one_process(world, keras_backend):
    together = SyncBatchNormalization()
    alone = keras.layers.BatchNormalization()
    together.build((None, 3))
    alone.build((None, 3))
    own = ROWS[job.rank()]

    def loss(layer: Any, rows: slice) -> Any:
        def compute(x: Any) -> Any:
            with keras.StatelessScope():
                return ops.sum(layer(x, training=True) ** 3 * ops.convert_to_tensor(WEIGHT[rows]))

        return compute

    (expected, *_) = _gradient(loss(alone, slice(None)), X, keras_backend)
    found = _gradient(loss(together, own), X[own], keras_backend)
    for gradient in found:
        np.testing.assert_allclose(gradient, expected[own], rtol=1e-4, atol=1e-4)


class _Own(keras.metrics.Metric):
    def __init__(self, largest: bool) -> None:
        super().__init__()
        self.value = self.add_weight(shape=(), initializer="zeros")
        self.largest = largest

    def update_state(self, y: Any, p: Any) -> None:
        new = ops.max(p)
        self.value.assign(ops.maximum(self.value, new) if self.largest else self.value + new)

    def result(self) -> Any:
        return self.value.value


@pytest.mark.backends("torch", "jax")
def test_metrics_are_tested_and_seeds_differ_by_rank(keras_backend):
    for largest in (False, True):
        metric = _Own(largest)
        metric.value.assign(5.0)
        assert bool(adds_up(metric, metric.update_state, (X, X), {})) is not largest
        assert float(metric.value.numpy()) == 5.0
    keras.utils.set_random_seed(3)
    expected = [ops.convert_to_numpy(keras.random.normal((4,))) for _ in range(4)]
    for member in (0, 1):
        keras.utils.set_random_seed(3)
        with random_by_rank(member):
            drawn = [ops.convert_to_numpy(keras.random.normal((4,))) for _ in range(2)]
        drawn += [ops.convert_to_numpy(keras.random.normal((4,))) for _ in range(2)]
        assert np.array_equal(drawn[:2], expected[:2]) is (member == 0)
        np.testing.assert_array_equal(drawn[2:], expected[2:])
