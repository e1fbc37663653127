"""What holds of every way to send a part of gradients, on one rank and on three of two hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives.single import single_collectives
from hvdtrain.gradients.compressors import GradientCompressor, choose_compressor, choose_wire
from hvdtrain.gradients.compressors.low_rank import LowRank
from hvdtrain.gradients.compressors.top_k import TopK
from tests.collectives.engines import EngineCase, everyone, shared_engine

HOSTS = (0, 0, 1)
SHAPES = [(12, 20), (3, 3, 4, 40), (40, 2, 16)]

KINDS = {
    "low-rank": lambda: LowRank(2),
    "top-k": lambda: TopK(0.05, HOSTS),
    "top-k of each rank": lambda: TopK(0.05, range(3)),
    "all": lambda: TopK(1.0, HOSTS),
}


@pytest.fixture(params=KINDS)
def compressor(request: pytest.FixtureRequest) -> GradientCompressor:
    return KINDS[request.param]()


@pytest.fixture
def engine(rank_count: int) -> Any:
    if rank_count == 1:
        return single_collectives()
    return shared_engine(EngineCase(kind="shared_memory", hosts=HOSTS))


def arrays_of(rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng([7, rank])
    return [rng.normal(size=shape).astype("float32") for shape in SHAPES]


def begin(compressor: GradientCompressor) -> list[np.ndarray]:
    return [np.zeros(compressor.state_shape(shape), np.float32) for shape in SHAPES]


@pytest.mark.ranks(1, 3)
def test_what_is_sent_and_what_is_left_are_all_there_is(compressor, engine):
    """Over all ranks; what is sent is the same on all of them."""
    states = begin(compressor)
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
        mine = [array.tobytes() for array in (*sent.means, *sent.states)]
        assert everyone(engine.size, mine) == [mine] * engine.size
        states = sent.states


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_a_rank_shows_on_all(compressor, engine, bad):
    arrays = arrays_of(engine.rank)
    if engine.rank == engine.size - 1:
        arrays[1][1, 2, 3, 30] = bad
    sent = compressor.average(engine, arrays, begin(compressor), weight=1.0, name="test")
    assert [bool(np.isfinite(mean).all()) for mean in sent.means] == [True, False, True]


@pytest.mark.ranks(3)
def test_with_top_k_a_host_chooses_from_the_sum_of_its_ranks(
    engine,
):
    """Each rank of it a part: of the first host one six of the twelve values, and so the other."""
    mine = np.zeros((3, 4), np.float32)
    mine[0, 0] = [3, -3, 12][engine.rank]
    mine[1, 1] = [2, 2, 0][engine.rank]
    mine[2, 2] = [1, 4, 0][engine.rank]
    sent = TopK(0.01, (0, 0, 1)).average(engine, [mine], [], weight=1.0, name="test")
    expected = np.zeros((3, 4))
    expected[[0, 1, 2], [0, 1, 2]] = np.array([12, 4, 5]) / 3
    np.testing.assert_allclose(sent.means[0], expected, rtol=1e-6)
    assert not engine.allreduce(sent.unsent[0]).any()
    gathered: list[str] = []
    engine.observers.append(lambda done: gathered.append(done.title))
    try:
        TopK(0.01, range(3)).average(engine, [mine], [], weight=1.0, name="test")
    finally:
        engine.observers.pop()
    assert gathered == ["allgather(largest of test)"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("compression", "kind", "wire"),
    [
        ("none", None, "none"),
        ("int8", None, "int8"),
        ("powersgd:4", LowRank, "none"),
        ("topk:0.01", TopK, "none"),
    ],
)
def test_chosen_by_name(compression, kind, wire):
    chosen = choose_compressor(compression, HOSTS)
    assert chosen is None if kind is None else isinstance(chosen, kind)
    assert choose_wire(compression) == wire
    # Within a host all is sent.
    assert choose_compressor(compression, (0, 0)) is None
