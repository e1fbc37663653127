"""Unsent parts of gradients, which are kept and sent in later steps."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.collectives.engine import single_engine
from hvdtrain.errors import NonFiniteError
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.gradients.powersgd import PowerSGD
from hvdtrain.gradients.ranks import EngineRanks
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.reduction_options import ReduceOptions

SHAPE = (20, 30)


def gradients(count: int, rank: int = 0) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=(count, *SHAPE)).astype("float32")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_sent_and_kept_parts_add_up_to_all_gradients(dtype):
    feedback, variable = ErrorFeedback(PowerSGD(1)), tf.Variable(tf.zeros(SHAPE))
    kept = feedback.keep(variable)
    inputs = [np.asarray(tf.cast(g, dtype)) for g in gradients(20)]
    sent = np.zeros(SHAPE)
    for gradient in inputs:
        (result,), weight = feedback.average(
            single_engine(),
            [kept],
            [gradient],
            op="average",
            weight=1.0,
            require_finite=True,
            name="test",
        )
        assert (result.dtype, result.shape, weight) == (gradient.dtype, SHAPE, 1.0)
        sent += result.astype("float64")
    total = np.sum(inputs, axis=0, dtype="float64")
    assert np.abs(kept.unsent.value).max() > 1
    # Rounding of half types is not kept.
    tolerance = {"float16": 0.05, "bfloat16": 0.5}.get(dtype, 1e-4)
    np.testing.assert_allclose(sent + kept.unsent.value, total, atol=tolerance)


def compressed_reducer(**options: str) -> GradientReducer:
    ranks = EngineRanks(job.collectives())
    return GradientReducer(ranks, ReduceOptions(powersgd_rank=1, **options))


@pytest.mark.ranks(2)
def test_only_dense_gradients_of_variables_are_compressed(world):
    reducer, rank = compressed_reducer(), job.rank()
    kernel, table = tf.Variable(tf.zeros(SHAPE)), tf.Variable(tf.zeros([40, 30]))

    @tf.function
    def step(gradient, op):
        rows = tf.IndexedSlices(gradient[:2], tf.constant([0, 1]), tf.constant([40, 30]))
        return reducer.average([gradient, rows, gradient], [kernel, table, "tensor"], op=op)

    mean = np.mean([gradients(1, r)[0] for r in range(2)], axis=0)
    compressed, rows, exact = step(gradients(1, rank)[0], "average")
    np.testing.assert_allclose(exact, mean, rtol=1e-6)
    np.testing.assert_allclose(tf.math.unsorted_segment_sum(rows.values, rows.indices, 2), mean[:2])
    first = np.abs(compressed - mean).max()
    assert first > 1
    kept = reducer.feedback.arrays([table, kernel])
    assert {key.split("/")[1] for key in kept} == {"0001"}
    # A graph traced later uses the kept part, even with another op.
    again = step(np.zeros(SHAPE, np.float32), "sum")[0]
    left = job.collectives().allreduce(reducer.feedback.keep(kernel).unsent.value, "average")
    np.testing.assert_allclose(compressed + again / 2 + left, mean, atol=1e-5)
    assert len(set(job.collectives().allgather_object(again.numpy().tobytes().hex()))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", ["kernel", "bias"])
def test_a_non_finite_step_does_not_change_the_kept_part(world, bad):
    reducer = compressed_reducer()
    variables = [tf.Variable(tf.zeros(SHAPE), name="kernel"), "bias"]
    clean = [gradients(1, job.rank())[0], np.ones(3, np.float32)]
    reducer.average(clean, variables)
    kept = reducer.feedback.keep(variables[0])
    before = [array.value.tobytes() for array in kept]
    broken = [np.array(value) for value in clean]
    if job.rank() == 1:
        broken[["kernel", "bias"].index(bad)][0] = np.nan
    with pytest.raises((NonFiniteError, tf.errors.OpError), match=rf"{bad}.* \(NaN\) on rank 1"):
        reducer.average(broken, variables)
    assert [array.value.tobytes() for array in kept] == before
    assert np.isfinite(reducer.average(clean, variables)[0]).all()


@pytest.mark.ranks(2)
def test_allowed_non_finite_values_are_not_kept(world):
    reducer, kernel = compressed_reducer(non_finite="ignore"), tf.Variable(tf.zeros(SHAPE))
    values = np.full(SHAPE, np.nan if job.rank() == 0 else 1.0, np.float32)
    assert np.isnan(reducer.average([values], [kernel])[0]).any()
    assert not reducer.feedback.keep(kernel).unsent.value.any()
