"""PowerSGD in one process, and on three ranks of two hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives.engine import single_engine
from hvdtrain.gradients.powersgd import PowerSGD, SentMeans, matrix_shape, orthonormal
from tests.collectives.engines import EngineCase, everyone, shared_engine

rng = np.random.default_rng(4)
SHAPES = [(12, 20), (3, 3, 4, 40), (40, 2, 16)]


@pytest.fixture
def engine(rank_count: int) -> Any:
    if rank_count == 1:
        return single_engine()
    return shared_engine(EngineCase(kind="shared_memory", hosts=(0, 0, 1)))


def arrays_of(rank: int) -> list[np.ndarray]:
    generator = np.random.default_rng([7, rank])
    return [generator.normal(size=shape).astype("float32") for shape in SHAPES]


def initial_states(compressor: PowerSGD) -> list[np.ndarray]:
    return [np.zeros(compressor.state_shape(shape), np.float32) for shape in SHAPES]


def narrow(rank: int, rows: int = 30, columns: int = 50) -> np.ndarray:
    product = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns))
    return product.astype("float32")


def send(compressor: PowerSGD, matrix: np.ndarray, state: np.ndarray | None = None) -> SentMeans:
    if state is None:
        state = np.zeros(compressor.state_shape(matrix.shape), np.float32)
    return compressor.average(single_engine(), [matrix], [state], weight=1.0, name="test")


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((10, 20), (10, 20)),
        ((3, 3, 64, 128), (576, 128)),
        ((5, 5, 1, 32), (25, 32)),
        ((7, 7, 3, 8), (49, 24)),
        ((512, 8, 64), (512, 512)),  # from model width to attention heads
        ((8, 64, 512), (512, 512)),  # from attention heads to model width
        ((4, 0), (4, 0)),
    ],
)
def test_matrices_are_as_square_as_possible(shape, matrix):
    assert matrix_shape(shape) == matrix


def test_only_arrays_that_shrink_by_half_are_compressed():
    compressor = PowerSGD(4)
    assert compressor.takes((16, 16))
    assert compressor.takes((3, 3, 64, 128))
    assert not any(map(compressor.takes, [(), (1000,), (15, 16), (1, 4096), (0, 8), (3, 3, 16, 1)]))


@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e30])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_low_rank_is_exact(rank, scale):
    matrix = narrow(rank) * np.float32(scale)
    compressor = PowerSGD(3)
    sent = send(compressor, matrix)
    for _ in range(3):
        np.testing.assert_allclose(sent.means[0], matrix, atol=1e-5 * np.abs(matrix).max())
        sent = send(compressor, matrix, sent.states[0])


def test_repeated_steps_converge_to_the_best_approximation():
    """The steps are a power iteration, which starts with the Q of the previous step."""
    matrix = rng.normal(size=(30, 50)).astype("float32")
    u, s, v = np.linalg.svd(matrix)
    best = np.linalg.norm(matrix - (u[:, :3] * s[:3]) @ v[:3])
    compressor, state, errors = PowerSGD(3), None, []
    for _ in range(60):
        sent = send(compressor, matrix, state)
        state = sent.states[0]
        errors.append(np.linalg.norm(sent.unsent[0]))
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_a_zero_gradient_does_not_spoil_the_next_steps():
    compressor, matrix = PowerSGD(2), narrow(2)
    empty = send(compressor, np.zeros_like(matrix))
    assert not empty.means[0].any()
    assert not empty.states[0].any()
    # A matrix of a lower rank leaves unused columns as well.
    for before in (empty, send(compressor, narrow(1))):
        assert np.isfinite(before.states[0]).all()
        sent = send(compressor, matrix, before.states[0])
        sent = send(compressor, matrix, sent.states[0])
        np.testing.assert_allclose(sent.means[0], matrix, atol=1e-4)


def test_the_basis_omits_dependent_columns():
    one, other = rng.normal(size=(2, 1000)).astype("float32")
    columns = np.stack([one, 3 * one, other, one - 2 * other, 0 * one], axis=1)
    basis = orthonormal(columns)
    assert basis.dtype == np.float32
    np.testing.assert_allclose(basis.T @ basis, np.diag([1, 0, 1, 0, 0]), atol=1e-6)
    assert np.isnan(orthonormal(np.where(columns == one[0], np.nan, columns))).any()


@pytest.mark.ranks(1, 3)
def test_sent_and_unsent_parts_add_up_to_the_mean(engine):
    compressor = PowerSGD(2)
    states = initial_states(compressor)
    for step in range(2):
        sent = compressor.average(
            engine, arrays_of(engine.rank + step), states, weight=engine.rank, name="test"
        )
        ranks = range(engine.size)
        assert sent.weight == pytest.approx(np.mean(ranks))
        exact = [np.mean(every, axis=0) for every in zip(*(arrays_of(r + step) for r in ranks))]
        left = engine.grouped_allreduce(sent.unsent, "average")
        for mean, rest, whole in zip(sent.means, left, exact):
            assert mean.any()
            assert (mean.dtype, mean.shape) == (np.float32, whole.shape)
            np.testing.assert_allclose(mean + rest, whole, atol=1e-5)
        own = [array.tobytes() for array in (*sent.means, *sent.states)]
        assert everyone(engine.size, own) == [own] * engine.size
        states = sent.states


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_of_one_rank_appear_on_all(engine, bad):
    arrays = arrays_of(engine.rank)
    if engine.rank == engine.size - 1:
        arrays[1][1, 2, 3, 30] = bad
    compressor = PowerSGD(2)
    sent = compressor.average(engine, arrays, initial_states(compressor), weight=1.0, name="test")
    assert [bool(np.isfinite(mean).all()) for mean in sent.means] == [True, False, True]
