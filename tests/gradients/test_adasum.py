"""Adasum of two vectors, and over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.gradients.array_reduction import adasum

WAYS = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])


def vector(rank: int) -> np.ndarray:
    return np.random.default_rng([5, rank]).normal(size=(3, 4))


def test_parallel_vectors_are_averaged_and_orthogonal_ones_added():
    a, b = np.array([2.0, 0.0]), np.array([0.0, 3.0])
    np.testing.assert_array_equal(adasum([a, b]), [2.0, 3.0])
    np.testing.assert_array_equal(adasum([a, a]), a)
    np.testing.assert_array_equal(adasum([a, np.zeros(2)]), a)
    np.testing.assert_array_equal(adasum([a, -a]), [0.0, 0.0])
    # (1 - 1/2) (1, 0) + (1 - 1/4) (1, 1), by hand
    np.testing.assert_allclose(adasum([np.array([1.0, 0.0]), np.array([1.0, 1.0])]), [1.25, 0.75])


@pytest.mark.ranks(1, 2, 4)
@WAYS
def test_adasum_over_ranks(world, compiled):

    def combine(x: tf.Tensor) -> list[tf.Tensor]:
        return hvd.grouped_allreduce([x, x[:1]], op=hvd.Adasum, postscale_factor=2.0)

    own = tf.constant(vector(hvd.rank()))
    results = (tf.function(combine) if compiled else combine)(own)
    every = [vector(rank) for rank in range(hvd.size())]
    for result, part in zip(results, (every, [one[:1] for one in every])):
        np.testing.assert_allclose(result, 2 * adasum(part), rtol=1e-12)


@pytest.mark.ranks(2)
def test_floating_dtypes(world):
    for dtype in (tf.float16, tf.bfloat16, tf.float32):
        own = tf.cast(tf.constant(vector(hvd.rank())), dtype)
        result = hvd.allreduce(own, op=hvd.Adasum)
        assert result.dtype == dtype
        every = [tf.cast(tf.cast(vector(rank), dtype), tf.float64).numpy() for rank in range(2)]
        np.testing.assert_allclose(tf.cast(result, tf.float64), adasum(every), rtol=1e-2, atol=1e-2)
    with pytest.raises(NotImplementedError, match="got int32"):
        hvd.allreduce(tf.constant([1, 2]), op=hvd.Adasum)


@pytest.mark.ranks(3)
def test_three_ranks_are_an_error(world):
    with pytest.raises(NotImplementedError, match="power of two as the number of ranks, got 3"):
        hvd.allreduce(tf.ones(2), op=hvd.Adasum)
