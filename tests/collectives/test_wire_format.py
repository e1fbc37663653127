"""What is lost where arrays cross between hosts in a smaller form."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.collectives.wire_format import wire_format
from hvdtrain.errors import NonFiniteError
from tests.collectives.engines import FAR, MANY_CHUNKS, EngineCase, everyone, shared_engine

FORMATS = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 127}
"""Largest error, relative to the value, or for int8 to the largest value of its block."""


def crossed(name: str, values: np.ndarray) -> np.ndarray:
    form = wire_format(name)
    assert form is not None
    data, result = np.empty(form.nbytes(values.size), np.uint8), np.empty_like(values)
    form.encode(values, data)
    form.decode(data, result)
    return result


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 5000])
def test_values_come_back_nearly(name: str, size: int) -> None:
    values = np.random.default_rng(1).normal(size=size).astype("float32")
    values[::7] = 0.0
    result = crossed(name, values)
    blocks = [np.abs(values[at : at + 1024]).max() for at in range(0, size, 1024)]
    scale = np.abs(values) if name != "int8" else np.repeat(blocks, 1024)[:size]
    assert (np.abs(result - values) <= FORMATS[name] * scale + 1e-7).all()
    assert (crossed(name, values) == result).all()


@pytest.mark.parametrize(("name", "share"), [("fp16", 2), ("bf16", 2), ("int8", 3.98)])
def test_bytes(name: str, share: float) -> None:
    form = wire_format(name)
    assert form is not None
    assert 4 * 100_000 / form.nbytes(100_000) == pytest.approx(share, rel=1e-2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_can_be_seen(name: str, bad: float) -> None:
    values = np.linspace(-1, 1, 3000, dtype="float32")
    values[1500] = bad
    assert not np.isfinite(crossed(name, values)).all()


def test_errors_of_int8_cancel_each_other() -> None:
    """As 0.3 of a step is rounded up three times of ten; rounded to the nearest it would vanish."""
    values = np.random.default_rng(2).normal(size=(1000, 1024)).astype("float32") * 1e-3
    values[:, 0] = 1.0  # a step of 1 / 127
    mean = np.mean([crossed("int8", row) for row in values], axis=0)[1:]
    error = np.abs(mean - values.mean(axis=0)[1:])
    assert error.mean() < 0.1 / 127


CASES = [
    EngineCase(kind="mpi", hosts=(0, 0, 0)),
    EngineCase(kind="shared_memory", hosts=(0, 0, 1), slots=6, link=FAR),
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_all_ranks_get_the_same(name, case):
    engine = shared_engine(case)
    mine = np.random.default_rng(engine.rank).normal(size=3 * MANY_CHUNKS).astype("float32")
    exact = engine.allreduce(mine, "average")
    [result] = engine.grouped_allreduce([mine], "average", wire=name)
    assert len(set(everyone(engine.size, result.tobytes().hex()))) == 1
    error = np.abs(result - exact).max()
    assert 0 < error < 4 * FORMATS[name] * np.abs(exact).max()
    # Other types, and what fits into the messages by which ranks agree, cross as they are.
    for array in (mine.astype("float64"), mine[:10]):
        [result] = engine.grouped_allreduce([array], "average", wire=name)
        np.testing.assert_array_equal(result, engine.allreduce(array, "average"))
    with pytest.raises(NonFiniteError, match="contains NaN"):
        engine.grouped_allreduce([mine * np.inf], wire=name, require_finite=True)
