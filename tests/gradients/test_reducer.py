"""Averages of gradients, and errors that name the rank and the variable."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import create
from hvdtrain.config import Settings
from hvdtrain.errors import MismatchError, NonFiniteError
from hvdtrain.gradients.ranks import EngineRanks
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.reduction_options import ReduceOptions
from tests.collectives.engines import EngineCase, new_engine

two = pytest.mark.ranks(2)
two_or_three = pytest.mark.ranks(2, 3)

Average = Callable[[GradientReducer, Sequence[Any], Sequence[str]], list[Any]]


def _eagerly(reducer: GradientReducer, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
    return reducer.average(gradients, names)


def _in_graph(
    reducer: GradientReducer, gradients: Sequence[Any], names: Sequence[str]
) -> list[Any]:
    return tf.function(lambda values: reducer.average(values, names))(list(gradients))


@pytest.fixture(params=[_eagerly, _in_graph], ids=["eager", "graph"])
def average(request: pytest.FixtureRequest, world) -> Average:
    return request.param


@pytest.fixture
def reducer(world) -> GradientReducer:
    return GradientReducer(EngineRanks(job.collectives()))


def _numbers(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).integers(-8, 9, shape).astype("float64")


def _gradient(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> tf.Tensor:
    return tf.constant(_numbers(rank, shape), dtype)


def _mean(shape: tuple[int, ...]) -> np.ndarray:
    return np.mean([_numbers(rank, shape) for rank in range(job.size())], axis=0)


def _assert_alike(arrays: Sequence[Any]) -> None:
    own = [np.asarray(array).tobytes().hex() for array in arrays]
    assert job.collectives().allgather_object(own) == [own] * job.size()


@two_or_three
def test_dense_gradients_of_several_dtypes(average: Average, reducer: GradientReducer) -> None:
    specs = [
        ((3, 4), "float32"),
        ((), "float64"),
        ((5,), "float16"),
        ((0, 2), "float32"),
        ((2, 2, 2), "bfloat16"),
        ((7,), "float64"),
        ((300, 17), "float32"),
    ]
    gradients = [_gradient(job.rank(), shape, dtype) for shape, dtype in specs]
    names = [f"layer/{index}" for index in range(len(specs))]
    results = average(reducer, gradients, names)
    for result, (shape, dtype) in zip(results, specs):
        assert (result.shape, result.dtype.name) == (shape, dtype)
        tolerance = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype, 1e-6)
        if job.size() < 3:
            tolerance = 0  # halves of small integers
        exact = _mean(shape)
        np.testing.assert_allclose(
            result.numpy().astype("float64"), exact, rtol=tolerance, atol=tolerance
        )
    _assert_alike(results)


@two
def test_static_shapes_are_kept_for_optimizers(reducer: GradientReducer) -> None:
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec([3, 4]), tf.TensorSpec([None, 2])])
    def step(kernel: tf.Tensor, rows: tf.Tensor) -> list[Any]:
        slices = tf.IndexedSlices(rows, tf.range(tf.shape(rows)[0]), tf.constant([5, 2]))
        results = reducer.average([kernel, slices], ["kernel", "table"])
        shapes.extend([results[0].shape.as_list(), results[1].values.shape.as_list()])
        return results

    step(tf.ones([3, 4]), tf.ones([2, 2]))
    assert shapes == [[3, 4], [None, 2]]


@two_or_three
def test_sparse_gradients(average: Average, reducer: GradientReducer) -> None:
    """Each rank has different rows, with duplicates. The last rank has none."""
    table = (9, 4)

    def slices(rank: int) -> tf.IndexedSlices:
        count = 0 if rank == job.size() - 1 else 3 + rank
        values = _gradient(rank, (count, 4))
        indices = np.random.default_rng(rank).integers(0, 3 + rank, count)
        return tf.IndexedSlices(values, tf.constant(indices, tf.int64), tf.constant(table))

    dense = _gradient(job.rank(), (2,))
    rows, other = average(reducer, [slices(job.rank()), dense], ["table", "bias"])
    exact = sum(tf.convert_to_tensor(slices(rank)).numpy() for rank in range(job.size()))
    assert isinstance(rows, tf.IndexedSlices)
    assert rows.indices.dtype == tf.int64
    assert tuple(rows.dense_shape.numpy()) == table
    assert rows.values.shape[0] == sum(range(3, 3 + job.size() - 1)), "a whole table was sent"
    np.testing.assert_allclose(tf.convert_to_tensor(rows), exact / job.size(), rtol=1e-6)
    np.testing.assert_allclose(other, _mean((2,)), rtol=1e-6)
    _assert_alike([rows.values, rows.indices])


@two
def test_none_remains_none(average: Average, reducer: GradientReducer) -> None:
    dense = _gradient(job.rank(), (2,))
    results = average(reducer, [None, dense, None], ["frozen", "kernel", "unused"])
    assert results[0] is None
    assert results[2] is None
    np.testing.assert_allclose(results[1], _mean((2,)), rtol=1e-6)
    assert average(reducer, [None, None], ["frozen", "unused"]) == [None, None]
    assert average(reducer, [], []) == []


@pytest.mark.ranks(1)
def test_a_single_rank_changes_nothing(average: Average, reducer: GradientReducer) -> None:
    gradients = [tf.constant([1.0, np.nan]), None]
    results = average(reducer, gradients, ["a", "b"])
    np.testing.assert_array_equal(results[0], gradients[0])
    assert results[1] is None


@two
def test_later_steps_do_not_overwrite_results(average: Average, reducer: GradientReducer) -> None:
    """TensorFlow tensors share memory with NumPy arrays."""
    held = []
    for step in range(8):
        gradients = [tf.fill([n], float(step + job.rank())) for n in (5, 3000, 70_000)]
        results = average(reducer, gradients, ["a", "b", "c"])
        held.append([results[0], tf.reshape(results[1], [30, 100])[2:], results[2]])
    gc.collect()
    for step, results in enumerate(held):
        for result in results:
            exact = step + (job.size() - 1) / 2
            np.testing.assert_allclose(result, np.full(result.shape, exact), rtol=1e-6)


def _slices(width: int = 4) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones([2, width]), tf.constant([0, 1]), tf.constant([9, width]))


DIFFERENCES = {
    "none": (lambda: tf.ones([2, 3]), lambda: None, "dense float32 (2, 3)", "None"),
    "shape": (
        lambda: tf.ones([2, 3]),
        lambda: tf.ones([3, 2]),
        "dense float32 (2, 3)",
        "dense float32 (3, 2)",
    ),
    "type": (
        lambda: tf.ones([2, 3]),
        lambda: tf.ones([2, 3], tf.float64),
        "dense float32 (2, 3)",
        "dense float64 (2, 3)",
    ),
    "sparse": (
        lambda: tf.ones([9, 4]),
        _slices,
        "dense float32 (9, 4)",
        "rows float32 (4,)",
    ),
    "width": (_slices, lambda: _slices(5), "rows float32 (4,)", "rows float32 (5,)"),
    "sparse-none": (_slices, lambda: None, "rows float32 (4,)", "None"),
}


@two
@pytest.mark.parametrize("alone", [False, True], ids=["with-others", "alone"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_mismatch_names_the_variable(average: Average, difference: str, alone: bool) -> None:
    reducer = GradientReducer(EngineRanks(job.collectives()))
    usual, odd, usual_text, odd_text = DIFFERENCES[difference]
    last = job.size() - 1
    gradients = [odd() if job.rank() == last else usual()]
    names = ["dense/kernel"]
    if not alone:
        gradients = [tf.ones(3), *gradients, None]
        names = ["conv/kernel", *names, "frozen"]
    with pytest.raises(MismatchError) as error, reducer.raising_own_errors():
        average(reducer, gradients, names)
    expected = (
        f"The gradients of rank 0 and rank {last} differ: dense/kernel is {usual_text} on rank 0 "
        f"and {odd_text} on rank {last}. All ranks must train the same variables"
    )
    assert expected in str(error.value)
    assert job.collectives().allreduce(np.ones(1)) == job.size(), "ranks are out of step"


@two
@pytest.mark.parametrize("known", [False, True], ids=["new", "seen-before"])
def test_a_gradient_that_becomes_none_is_named(world, known: bool) -> None:
    """This can happen with eager execution."""
    reducer = GradientReducer(
        EngineRanks(new_engine(EngineCase(kind="shared_memory", hosts=(0, 0))))
    )
    names, gradient = ["conv/kernel", "dense/kernel"], tf.ones(3)
    usual, odd = [gradient, gradient], [gradient, None]
    reducer.average(usual, names)
    if known:
        reducer.average(odd, names)
    with pytest.raises(MismatchError, match="None for dense/kernel"), reducer.raising_own_errors():
        reducer.average(odd if job.rank() == 1 else usual, names)


@two
def test_an_error_that_was_caught_does_not_replace_a_later_one(
    average: Average, reducer: GradientReducer
) -> None:
    def train() -> None:
        with pytest.raises((MismatchError, tf.errors.OpError), match="differ"):
            average(reducer, [tf.ones(3 + job.rank())], ["kernel"])
        raise tf.errors.DataLossError(None, None, "a corrupt record")

    with pytest.raises(tf.errors.DataLossError), reducer.raising_own_errors():
        train()


@two
def test_different_names_or_order(average: Average) -> None:
    kernels = [tf.ones(3), tf.ones(3)]
    last = job.size() - 1
    names = ["b", "a"] if job.rank() == last else ["a", "b"]
    with pytest.raises((MismatchError, tf.errors.OpError), match="they have a different order"):
        average(GradientReducer(EngineRanks(job.collectives())), kernels, names)
    names = ["a", "c" if job.rank() == last else "b"]
    text = rf"b is dense float32 \(3,\) on rank 0 and absent on rank {last}; c is absent on rank 0"
    with pytest.raises((MismatchError, tf.errors.OpError), match=text):
        average(GradientReducer(EngineRanks(job.collectives())), kernels, names)
    count = 1 if job.rank() == last else 2
    with pytest.raises((MismatchError, tf.errors.OpError), match=rf"absent on rank {last}"):
        average(
            GradientReducer(EngineRanks(job.collectives())), kernels[:count], ["a", "b"][:count]
        )


@two
def test_a_mismatch_of_variables_with_the_same_name(average: Average) -> None:
    """The default name of all variables in TensorFlow is "Variable:0"."""
    last = job.size() - 1
    gradients = [tf.ones(3), tf.ones(4), tf.ones(5)]
    if job.rank() == last:
        gradients[1] = None
    text = rf"Variable:0#2 is dense float32 \(4,\) on rank 0 and None on rank {last}"
    with pytest.raises((MismatchError, tf.errors.OpError), match=text):
        average(GradientReducer(EngineRanks(job.collectives())), gradients, ["Variable:0"] * 3)


@two_or_three
def test_non_finite_errors_name_rank_and_variable(
    average: Average, reducer: GradientReducer
) -> None:
    names = ["conv/kernel", "dense/kernel", "dense/bias", "half"]
    clean = [tf.ones([2, 3]), tf.ones(4), tf.ones(5), tf.ones(2, tf.float16)]
    last = job.size() - 1
    for bad, where, text in (
        (np.nan, 1, "dense/kernel (NaN)"),
        (np.inf, 2, "dense/bias (infinity)"),
        (np.nan, 3, "half (NaN)"),
    ):
        gradients = list(clean)
        if job.rank() == last:
            gradients[where] = tf.cast(tf.fill(clean[where].shape, bad), clean[where].dtype)
        with pytest.raises(NonFiniteError) as error, reducer.raising_own_errors():
            average(reducer, gradients, names)
        assert f"A gradient is not finite: {text} on rank {last}. " in str(error.value)
        assert "HVDTRAIN_NON_FINITE=ignore" in str(error.value)
        results = average(reducer, clean, names)
        assert all(np.allclose(result, 1) for result in results), "ranks can't continue"


@two
def test_non_finite_gradients_on_several_ranks(average: Average, reducer: GradientReducer) -> None:
    gradients = [tf.fill([3], np.nan if job.rank() != 1 else 1.0), tf.constant([np.inf])]
    with pytest.raises((NonFiniteError, tf.errors.OpError)) as error:
        average(reducer, gradients, ["kernel", "bias"])
    assert "not finite: kernel (NaN), bias (infinity) on rank 0; bias (infinity) on rank 1" in str(
        error.value
    )


@two
def test_non_finite_sparse_gradients(average: Average, reducer: GradientReducer) -> None:
    bad = np.nan if job.rank() == 0 else 1.0
    slices = tf.IndexedSlices(tf.fill([2, 3], bad), tf.constant([0, 1]), tf.constant([9, 3]))
    with pytest.raises((NonFiniteError, tf.errors.OpError), match=r"table on rank 0\. "):
        average(reducer, [slices], ["table"])


@two
def test_overflow_of_the_sum(average: Average, reducer: GradientReducer) -> None:
    with pytest.raises((NonFiniteError, tf.errors.OpError), match="the sum over all ranks"):
        average(reducer, [tf.fill([3], 3e38)], ["kernel"])


@two
def test_non_finite_values_can_be_allowed(average: Average, world) -> None:
    """Loss scaling checks for non-finite values itself."""
    reducer = GradientReducer(EngineRanks(job.collectives()), ReduceOptions(non_finite="ignore"))
    values = [np.inf, np.nan] if job.rank() == 0 else [1.0, 1.0]
    slices = tf.IndexedSlices(tf.constant([values]), tf.constant([0]), tf.constant([2, 2]))
    dense, rows = average(reducer, [tf.constant(values), slices], ["kernel", "table"])
    assert np.isinf(dense[0])
    assert np.isnan(dense[1])
    assert np.isinf(rows.values[0, 0])


@two
def test_buckets_give_the_same_sums(reducer: GradientReducer) -> None:
    """Buckets start with the last gradients."""
    shapes = [(20,), (3, 5), (30,), (1,), (2,)]
    gradients = [_gradient(job.rank(), shape) for shape in shapes]
    names = [f"kernel {n}" for n in range(len(shapes))]
    together = _in_graph(reducer, gradients, names)
    engine = create(read_topology(os.environ), Settings(bucket_bytes=100))
    reducer = GradientReducer(EngineRanks(engine))
    _eagerly(reducer, gradients, names)  # compares signatures
    calls: list[str] = []
    engine.observers.append(lambda operation: calls.append(operation.call))
    _eagerly(reducer, gradients, names)
    assert len(calls) == 1, "eager gradients are not bucketed"
    calls.clear()
    in_buckets = _in_graph(reducer, gradients, names)
    assert [text.partition(" with ")[2] for text in calls] == [
        "average, float32, ((2,), (1,), (30,))",
        "average, float32, ((3, 5), (20,))",
    ]
    for one, other in zip(together, in_buckets):
        np.testing.assert_array_equal(one, other)
    if job.rank() == 0:
        gradients[1] = tf.fill(shapes[1], np.nan)
    with pytest.raises((NonFiniteError, tf.errors.OpError), match=r"kernel 1 \(NaN\) on rank 0\. "):
        _in_graph(reducer, gradients, names)
    engine.close()


@two
def test_reduce_small_tensors(reducer: GradientReducer) -> None:
    for run in (lambda f: f, tf.function):
        steps = run(lambda value: reducer.reduce(value, "max", "steps"))(tf.constant(job.rank()))
        assert (steps.dtype, steps.shape, int(steps)) == (tf.int32, (), job.size() - 1)
        flag = run(lambda value: reducer.reduce(value, "min", "flag"))(tf.constant(job.rank() > 0))
        assert not bool(flag)


@two
def test_signatures_are_compared_once(reducer: GradientReducer, monkeypatch) -> None:
    names = []
    gather = reducer.collectives.allgather_object
    monkeypatch.setattr(
        reducer.collectives,
        "allgather_object",
        lambda *args, **options: names.append(options["name"]) or gather(*args, **options),
    )
    step = tf.function(lambda g: reducer.average([g], ["kernel"]))
    for _ in range(4):
        step(tf.ones(3))
    assert names == ["gradient signatures"]


def test_failure_of_another_rank_within_a_graph(launch) -> None:
    script = """
        import numpy as np, tensorflow as tf
        import hvdtrain
        from hvdtrain import world
        from hvdtrain.gradients.ranks import EngineRanks
        from hvdtrain.gradients.reducer import GradientReducer

        hvdtrain.init()
        hvdtrain.shutdown()
        hvdtrain.init()
        reducer = GradientReducer(EngineRanks(world.collectives()))
        step = tf.function(lambda g: reducer.average([g], ["dense/kernel"]))
        step(tf.ones(3))
        if hvdtrain.rank() == 1:
            raise ValueError("no more data")
        step(tf.ones(3))
    """
    done = launch(2, script)
    assert done.returncode == 1
    assert "hvdtrain: rank 1 of 2 failed: ValueError: no more data" in done.stderr
    assert (
        "hvdtrain: rank 0 of 2 stops: rank 1 failed: ValueError: no more data (" in done.stderr
    ), done
    assert "Rank 0 was waiting for it in allreduce(gradients)" in done.stderr
