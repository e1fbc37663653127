"""Compressed formats for arrays between hosts, and their errors."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.collectives.wire_format import wire_format
from hvdtrain.errors import NonFiniteError
from tests.collectives.engines import FAR, MANY_CHUNKS, EngineCase, everyone, shared_engine

FORMATS = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 127}
"""Maximum error, relative to the value, or for int8 to the largest value of the block."""


def _round_trip(name: str, values: np.ndarray) -> np.ndarray:
    form = wire_format(name)
    assert form is not None
    data, result = np.empty(form.nbytes(values.size), np.uint8), np.empty_like(values)
    form.encode(values, data)
    form.decode(data, result)
    return result


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 5000])
def test_decoded_values_are_close(name: str, size: int) -> None:
    values = np.random.default_rng(1).normal(size=size).astype("float32")
    values[::7] = 0.0
    result = _round_trip(name, values)
    blocks = [np.abs(values[at : at + 1024]).max() for at in range(0, size, 1024)]
    scale = np.abs(values) if name != "int8" else np.repeat(blocks, 1024)[:size]
    assert (np.abs(result - values) <= FORMATS[name] * scale + 1e-7).all()
    assert (_round_trip(name, values) == result).all()


@pytest.mark.parametrize(("name", "share"), [("fp16", 2), ("bf16", 2), ("int8", 3.98)])
def test_encoded_size(name: str, share: float) -> None:
    form = wire_format(name)
    assert form is not None
    assert 4 * 100_000 / form.nbytes(100_000) == pytest.approx(share, rel=1e-2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_stay_non_finite(name: str, bad: float) -> None:
    values = np.linspace(-1, 1, 3000, dtype="float32")
    values[1500] = bad
    assert not np.isfinite(_round_trip(name, values)).all()


def test_errors_of_int8_average_out() -> None:
    """A value of 0.3 steps is rounded up three times out of ten. Nearest rounding would lose it."""
    values = np.random.default_rng(2).normal(size=(1000, 1024)).astype("float32") * 1e-3
    values[:, 0] = 1.0  # a step of 1 / 127
    mean = np.mean([_round_trip("int8", row) for row in values], axis=0)[1:]
    error = np.abs(mean - values.mean(axis=0)[1:])
    assert error.mean() < 0.1 / 127


CASES = [
    EngineCase(kind="mpi", hosts=(0, 0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0, 1), slots=6, link=FAR),
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_all_ranks_get_the_same_result(name, case):
    engine = shared_engine(case)
    array = np.random.default_rng(engine.rank).normal(size=3 * MANY_CHUNKS).astype("float32")
    exact = engine.allreduce(array, "average")
    [result] = engine.grouped_allreduce([array], "average", wire=name)
    assert len(set(everyone(engine.size, result.tobytes().hex()))) == 1
    error = np.abs(result - exact).max()
    assert 0 < error < 4 * FORMATS[name] * np.abs(exact).max()
    # Other dtypes and small arrays are not converted.
    for other in (array.astype("float64"), array[:10]):
        [result] = engine.grouped_allreduce([other], "average", wire=name)
        np.testing.assert_array_equal(result, engine.allreduce(other, "average"))
    with pytest.raises(NonFiniteError, match="contains NaN"):
        engine.grouped_allreduce([array * np.inf], wire=name, require_finite=True)
