"""Reductions with every engine, operation, dtype and shape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvdtrain.collectives.kernels import OPS
from hvdtrain.errors import ConfigurationError, NonFiniteError
from tests.collectives.engines import (
    BFLOAT16,
    DTYPES,
    EVERY_ENGINE,
    Subject,
    expected,
    values,
)

pytestmark = EVERY_ENGINE

# Indices of shapes: a scalar, an empty array, and one that fills a chunk.
ALONE = (0, 1, 8)
HALVES = [np.dtype(np.float16), BFLOAT16]


def _is_refused(op: str, dtype: np.dtype) -> bool:
    floating = dtype == BFLOAT16 or dtype.kind == "f"
    return (op == "average" and not floating) or (op == "sum" and dtype.kind == "b")


@pytest.mark.parametrize("op", OPS)
def test_allreduce(subject: Subject, op) -> None:
    engine = subject.engine
    results = []
    for dtype in DTYPES:
        shapes = subject.shapes(dtype)
        inputs = [values(engine.rank, shape, dtype) for shape in shapes]
        if _is_refused(op, dtype):
            with pytest.raises(ConfigurationError, match=rf"op='{op}'.*{dtype.name}"):
                engine.grouped_allreduce(inputs, op)
            continue
        kept = [array.copy() for array in inputs]
        together = engine.grouped_allreduce(inputs, op, name=f"{op} {dtype.name}")
        alone = [engine.allreduce(inputs[index], op) for index in ALONE]
        for array, copy in zip(inputs, kept):
            np.testing.assert_array_equal(array, copy, err_msg="modified input")
        references = [expected(op, engine.size, shape, values, dtype) for shape in shapes]
        for result, reference in zip(together, references):
            assert result.dtype == dtype
            assert result.shape == reference.shape
            np.testing.assert_array_equal(result, reference, err_msg=f"{op} of {dtype}")
        for result, index in zip(alone, ALONE):
            np.testing.assert_array_equal(result, references[index], err_msg=f"{op} of {dtype}")
        results += [*together, *alone]
    subject.assert_alike(results)


@pytest.mark.parametrize("op", ["sum", "average"])
def test_rounding_is_the_same_on_all_ranks(subject: Subject, op) -> None:
    engine = subject.engine
    for dtype in (np.float32, np.float64):
        shape = (3, 2 * subject.case.chunk_bytes // 8 + 1)
        every = [
            np.random.default_rng([rank, 7]).normal(0, 10.0 ** (3 * rank), shape).astype(dtype)
            for rank in range(engine.size)
        ]
        results = [engine.allreduce(every[engine.rank], op) for _ in range(2)]
        reference = np.sum(every, axis=0, dtype=np.longdouble)
        reference /= engine.size if op == "average" else 1
        bound = 4 * np.finfo(dtype).eps * np.abs(every).sum(axis=0)
        assert (np.abs(results[0] - reference) <= bound).all()
        assert results[0].tobytes() == results[1].tobytes(), "differs from run to run"
        subject.assert_alike(results)


@pytest.mark.parametrize("op", ["sum", "average", "product"])
def test_half_types_are_reduced_in_float32(subject: Subject, op) -> None:
    """Half types would lose small contributions and overflow with large ones."""
    for dtype in HALVES:
        _check_half_type(subject.engine, dtype, op)


def _check_half_type(engine, dtype: np.dtype, op) -> None:
    limit = 2048 if dtype == np.float16 else 256  # from here on x + 1 == x
    large = np.finfo(np.float16).max if dtype == np.float16 else 2.0
    every = np.ones((engine.size, 3), np.float32)
    every[0] = limit, large, 3.0
    every[1:] = 1.0, large, 1 + 2.0**-7
    if op != "average":
        every[:, 1] = 1.0
    every = every.astype(dtype)
    result = engine.allreduce(every[engine.rank], op)
    wide = every.astype(np.float32)
    total = wide.prod(axis=0) if op == "product" else wide.sum(axis=0)
    reference = (total * np.float32(1 / engine.size) if op == "average" else total).astype(dtype)
    np.testing.assert_array_equal(result, reference)
    if engine.size > 2 and op == "sum":
        narrow = every[0]
        for contribution in every[1:]:
            narrow = narrow + contribution
        assert narrow[0] != result[0], "the case does not distinguish the dtypes"


def test_integers_wrap_like_numpy(subject: Subject) -> None:
    engine = subject.engine
    result = engine.allreduce(np.full(5, 127, np.int8))
    np.testing.assert_array_equal(result, np.full(5, 127 * engine.size).astype(np.int8))
    result = engine.allreduce(np.array([2**63 + engine.rank], np.uint64), "max")
    assert result.tolist() == [2**63 + engine.size - 1], "large integers must be exact"


def test_arrays_of_any_memory_layout(subject: Subject) -> None:
    engine = subject.engine
    base = np.arange(2000.0).reshape(40, 50) + engine.rank
    read_only = base.copy()
    read_only.flags.writeable = False
    inputs = [base.T, base[::-2, ::3], np.asfortranarray(base), read_only]
    ranks = sum(range(engine.size))
    for array, result in zip(inputs, engine.grouped_allreduce(inputs)):
        np.testing.assert_array_equal(result, (array - engine.rank) * engine.size + ranks)
        assert result.flags.c_contiguous
        assert result.flags.writeable


def test_non_native_byte_order(subject: Subject) -> None:
    engine = subject.engine
    for dtype in ("<i4", ">i4", "<i4"):
        result = engine.allreduce(np.array([1, 2, 70000], dtype))
        np.testing.assert_array_equal(result, np.array([1, 2, 70000]) * engine.size)
    with pytest.raises(ConfigurationError, match=r"or bool, got >f4"):
        engine.allreduce(np.ones(2, ">f4"))


def test_empty_arrays(subject: Subject) -> None:
    engine = subject.engine
    assert engine.grouped_allreduce([]) == []
    results = engine.grouped_allreduce([np.empty((0, 3)), np.empty(0)], "average")
    assert [result.shape for result in results] == [(0, 3), (0,)]
    assert engine.reduce_scatter(np.empty((0, 2), np.int32)).shape == (0, 2)


def test_non_finite_results_are_an_error_on_all_ranks(subject: Subject) -> None:
    engine = subject.engine
    last = engine.size - 1
    many = subject.case.chunk_bytes // 4 * 3
    for dtype, bad in itertools.product([*HALVES, "float32", "float64"], [np.nan, -np.inf]):
        array = np.ones(many, dtype)
        if engine.rank == last:
            array[-1] = bad
        with pytest.raises(NonFiniteError, match=r"allreduce\(weights\).*NaN or infinity"):
            engine.grouped_allreduce([array, array[:3]], name="weights", require_finite=True)
        result = engine.allreduce(array)
        assert np.isnan(result[-1]) if np.isnan(bad) else result[-1] == bad
        result = engine.grouped_allreduce([np.ones(many, dtype)], require_finite=True)[0]
        np.testing.assert_array_equal(result, np.full(many, engine.size, dtype))


def test_operations_after_a_non_finite_result_are_finite_again(subject: Subject) -> None:
    """This includes ranks whose share of the operation is empty."""
    engine = subject.engine
    with pytest.raises(NonFiniteError):
        engine.grouped_allreduce([np.full(1000, np.nan)], require_finite=True)
    for _ in range(3):
        engine.grouped_allreduce([np.ones(1)], require_finite=True)


def test_overflow_of_half_types_is_not_finite(subject: Subject) -> None:
    """The float32 sum is finite, but the result is not."""
    engine = subject.engine
    if engine.size == 1:
        return
    for dtype, largest in zip(HALVES, (65504.0, 3.3e38)):
        with pytest.raises(NonFiniteError):
            engine.grouped_allreduce([np.full(3, largest, dtype)], "sum", require_finite=True)
        result = engine.grouped_allreduce([np.full(3, largest / 4, dtype)], require_finite=True)[0]
        assert np.isfinite(result.astype(np.float64)).all()


def test_integers_are_always_finite(subject: Subject) -> None:
    for dtype in (np.int64, np.uint8):
        result = subject.engine.grouped_allreduce([np.ones(3, dtype)], require_finite=True)[0]
        assert result.tolist() == [subject.engine.size] * 3


@pytest.mark.parametrize("op", OPS)
def test_reduce_scatter(subject: Subject, op) -> None:
    engine = subject.engine
    results = []
    for dtype in DTYPES:
        if _is_refused(op, dtype):
            with pytest.raises(ConfigurationError, match=rf"op='{op}'.*{dtype.name}"):
                engine.reduce_scatter(np.ones(3, dtype), op)
            continue
        shapes = [(engine.size + 1, 3)]
        if dtype == np.float32:
            shapes += [(1,), (engine.size, 2, 2), (4 * engine.size + 1,), (7, 0)]
            shapes += [(engine.size + 1, 40_000)]
        for shape in shapes:
            array = values(engine.rank, shape, dtype)
            kept = array.copy()
            result = engine.reduce_scatter(array, op, name="share")
            np.testing.assert_array_equal(array, kept, err_msg="modified input")
            whole = expected(op, engine.size, shape, values, dtype)
            share = np.array_split(whole, engine.size)[engine.rank]
            assert result.dtype == dtype
            assert result.shape == share.shape
            np.testing.assert_array_equal(result, share)
            results.append(result)
    subject.assert_alike([np.array(len(results))])


def test_invalid_operations_and_dtypes(subject: Subject) -> None:
    with pytest.raises(ConfigurationError, match=r"sum, average, min, max, product, got 'mean'"):
        subject.engine.allreduce(np.ones(2), "mean")
    with pytest.raises(ConfigurationError, match=r"float16.*got complex64"):
        subject.engine.allreduce(np.ones(2, np.complex64))
    with pytest.raises(ConfigurationError, match=r"got float32, float64.*one call for each"):
        subject.engine.grouped_allreduce([np.ones(2), np.ones(2, np.float32)])
