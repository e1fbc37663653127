from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data.partition import Position
from hvdtrain.errors import DataError
from hvdtrain.trainer.data.tensorflow import pipeline
from tests.trainer.data.ranks import flat, joint, on_ranks, read, shard, shard_on_ranks

# Each pipeline takes some tenths of a second.
pytestmark = pytest.mark.slow

Dataset = tf.data.Dataset


def _ids(rows: int, batch_size: int, **options) -> Dataset:
    ids = np.arange(rows)
    x = np.stack([ids, -ids], axis=1).astype("float32")
    return Dataset.from_tensor_slices((x, ids)).batch(batch_size, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 23, 24])
def test_a_joint_step_consists_of_the_next_batches(size: int, rows: int) -> None:
    batches = [list(range(start, min(start + 4, rows))) for start in range(0, rows, 4)]
    shares = shard_on_ranks(size, lambda _: _ids(rows, 4))
    expected = [flat(batches[start : start + size]) for start in range(0, len(batches), size)]
    for _ in range(2):
        assert joint(shares) == expected
    assert {share.steps for share in shares} == {len(expected)}
    assert {int(share.dataset.cardinality()) for share in shares} == {len(expected)}


@pytest.mark.parametrize("size", [2, 3])
def test_batches_of_different_sizes(size: int) -> None:
    def make(_: int) -> Dataset:
        sizes = Dataset.from_tensor_slices([3, 1, 2, 5, 1, 1, 4])
        starts = Dataset.from_tensor_slices([0, 3, 4, 6, 11, 12, 13])
        return Dataset.zip(starts, sizes).map(lambda start, n: tf.range(start, start + n))

    steps = joint(shard_on_ranks(size, make))
    assert flat(steps) == list(range(17))
    assert [len(step) for step in steps] == {2: [4, 7, 2, 4], 3: [6, 7, 4]}[size]


def test_an_unknown_length() -> None:
    shares = shard_on_ranks(3, lambda _: _ids(22, 2).filter(lambda x, y: y[0] != 4))
    assert shares[0].steps is None
    assert flat(joint(shares)) == [i for i in range(22) if i not in (4, 5)]


def test_an_endless_dataset_needs_steps() -> None:
    with pytest.raises(DataError, match="steps_per_epoch"):
        shard_on_ranks(2, lambda _: _ids(10, 2).repeat())
    shares = shard_on_ranks(2, lambda _: _ids(10, 2).repeat(), steps=9)
    assert shares[0].steps is None
    seen = [read(share, limit=5) for share in shares]
    ids = [sample for ranks in zip(*seen) for step in ranks for sample in step.ids]
    assert ids == list(range(10)) * 2


def test_a_seeded_shuffle_yields_every_sample_once() -> None:
    def make(_: int) -> Dataset:
        return Dataset.range(50).shuffle(50, seed=3).batch(4)

    shares = shard_on_ranks(3, make)
    first, second = flat(joint(shares)), flat(joint(shares))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    # The orders are the same as without hvdtrain.
    plain = Dataset.range(50).shuffle(50, seed=3)
    assert [int(i) for i in plain] == first
    assert [int(i) for i in plain] == second


def test_the_dataset_of_a_pipeline_is_created_once() -> None:
    pipelines = [_ids(22, 4) for _ in range(2)]
    first, again = (shard_on_ranks(2, lambda rank: pipelines[rank]) for _ in range(2))
    assert [share.dataset for share in first] == [share.dataset for share in again]
    others = (
        shard_on_ranks(2, lambda rank: pipelines[rank], trains=True),
        shard_on_ranks(2, lambda rank: pipelines[rank], presharded=True),
        shard_on_ranks(2, lambda rank: (pipelines[rank], None, None), class_weight={0: 2.0}),
        shard_on_ranks(2, lambda rank: pipelines[1 - rank]),
    )
    for shares in others:
        assert {id(s.dataset) for s in shares}.isdisjoint(id(s.dataset) for s in first)
    # All of them still compare the batches.
    assert [flat(joint(shares)) for shares in (first, again)] == [list(range(22))] * 2
    for shares in (first, again):
        results = on_ranks(2, lambda engine, shares=shares: shares[engine.rank].verify())
        assert results == [None, None]


def test_a_static_batch_size_stays_static() -> None:
    share = shard_on_ranks(2, lambda _: _ids(16, 4, drop_remainder=True))[0]
    assert share.dataset.element_spec[0][0].shape == (4, 2)


@pytest.mark.parametrize(
    ("convert", "to_list"),
    [
        (tf.ragged.constant, lambda ragged: ragged.to_list()),
        (
            lambda rows: tf.ragged.constant(rows).to_sparse(),
            lambda sparse: tf.RaggedTensor.from_sparse(sparse).to_list(),
        ),
    ],
    ids=["ragged", "sparse"],
)
def test_ragged_and_sparse_components(convert, to_list) -> None:
    rows = [[1.0], [2.0, 2.0], [], [3.0, 3.0, 3.0], [4.0]]

    def make(_: int) -> Dataset:
        return Dataset.zip(Dataset.from_tensor_slices(convert(rows)), Dataset.range(5)).batch(2)

    for share in shard_on_ranks(2, make):
        for step in read(share):
            assert to_list(step.batch[0])[: step.rows] == [rows[i] for i in step.ids]


def test_class_weights() -> None:
    def make(_: int) -> Dataset:
        return Dataset.from_tensor_slices((np.zeros((4, 1)), np.array([0, 1, 2, 1]))).batch(2)

    shares = shard_on_ranks(2, make, class_weight={0: 3.0, 2: 0.5})
    weights = [next(iter(share.dataset))[0][2].numpy().tolist() for share in shares]
    assert weights == [[3.0, 1.0], [0.5, 1.0]]
    with pytest.raises(DataError, match="with targets"):
        shard_on_ranks(1, lambda _: Dataset.range(4).batch(2), class_weight={0: 1.0})
    with pytest.raises(ValueError, match="sample_weight"):
        shard_on_ranks(1, lambda _: make(0).map(lambda x, y: (x, y, y)), class_weight={0: 1.0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: Dataset.range(4), r"x is a single value.*Dataset\.batch"),
        (lambda _: Dataset.from_tensor_slices((np.zeros((4, 3)), np.zeros(4))), "y is a single"),
        (
            lambda _: Dataset.from_tensor_slices((np.zeros((4, 3)), np.zeros((4, 2)))),
            "got: x has 3",
        ),
        (lambda _: Dataset.range(4).window(2), r"dense, ragged or sparse"),
        (lambda _: Dataset.range(0).batch(2), "is empty"),
    ],
)
def test_unsupported_datasets(make, message: str) -> None:
    with pytest.raises(DataError, match=message):
        shard_on_ranks(2, make)


def test_targets_in_addition_to_a_dataset_are_an_error() -> None:
    with pytest.raises(ValueError, match="`y` should not be passed"):
        shard_on_ranks(1, lambda _: (_ids(4, 2), np.zeros(4)))


def test_a_different_length_or_type_on_one_rank_is_an_error() -> None:
    with pytest.raises(DataError, match="number of batches is 6 on rank 0, 5 on rank 1"):
        shard_on_ranks(2, lambda rank: _ids(12 - 2 * rank, 2))
    with pytest.raises(DataError, match=r"x is float32 .* float64 .* on rank 1"):
        shard_on_ranks(
            2, lambda rank: _ids(8, 2).map(lambda x, y: (tf.cast(x, "float64") if rank else x, y))
        )


def _read_and_verify(make, limit=None):
    """Return the result of ``verify`` on two ranks after they have read up to ``limit`` steps."""

    def run(engine):
        share = shard(engine, make(engine.rank))
        share.on_epoch_begin(0)
        read(share, limit)
        share.verify()
        share.on_epoch_end()
        return share

    return on_ranks(2, run)


def test_an_unseeded_shuffle_is_an_error_after_the_first_step() -> None:
    def make(_: int) -> Dataset:
        return Dataset.range(1000).shuffle(1000).batch(8)

    for result in _read_and_verify(make, limit=1):
        with pytest.raises(DataError, match=r"first joint step.*seed=1.*presharded=True"):
            raise result


def test_a_difference_after_the_first_step_is_an_error_at_the_end_of_the_pass() -> None:
    def make(rank: int) -> Dataset:
        ids = np.arange(100)
        ids[90] += rank
        return Dataset.from_tensor_slices(ids).batch(7)

    for result in _read_and_verify(make):
        with pytest.raises(DataError, match="a whole pass"):
            raise result


@pytest.mark.parametrize("batches", [1, 2, 3, 8])
def test_random_augmentation_of_inputs_is_allowed(batches: int) -> None:
    def make(_: int) -> Dataset:
        return _ids(2 * batches, 2).map(lambda x, y: (x + tf.random.normal([2]), y))

    for result in _read_and_verify(make):
        assert not isinstance(result, Exception), result


def test_the_order_is_deterministic_despite_the_users_options() -> None:
    def make(_: int) -> Dataset:
        options = tf.data.Options()
        options.deterministic = False
        return _ids(10, 2).with_options(options)

    assert shard_on_ranks(2, make)[0].dataset.options().deterministic


@pytest.mark.parametrize(
    ("name", "value"), [("enabled", True), ("enabled", False), ("cpu_budget", 3)]
)
def test_options_of_the_pipeline_are_kept(name: str, value: bool | int) -> None:
    options = tf.data.Options()
    setattr(options.autotune, name, value)
    options.threading.private_threadpool_size = 2

    given = [_ids(10, 2).with_options(options) for _ in range(2)]
    kept = shard_on_ranks(2, lambda rank: given[rank])[0].dataset.options()
    assert (kept.autotune, kept.threading) == (options.autotune, options.threading)
    assert given[0].options().autotune == options.autotune


def _nested(change):
    return lambda d: Dataset.range(1).flat_map(lambda _: change(d))


_UNORDERED = {
    "ParallelInterleave": lambda d: d.interleave(
        Dataset.from_tensors, num_parallel_calls=2, deterministic=False
    ),
    "ParallelMap": lambda d: d.map(lambda x: x, num_parallel_calls=2, deterministic=False),
    "ParallelBatch": lambda d: d.batch(2, num_parallel_calls=2, deterministic=False).unbatch(),
}


@pytest.mark.parametrize("kind", _UNORDERED)
@pytest.mark.parametrize("place", ["outside", "in a function"])
def test_an_unordered_pipeline_is_an_error(kind: str, place: str) -> None:
    change = _UNORDERED[kind] if place == "outside" else _nested(_UNORDERED[kind])

    def make(rank: int) -> Dataset:
        return change(Dataset.range(8)).batch(2)

    with pytest.raises(DataError, match=rf"deterministic=False in .*{kind}.*presharded=True"):
        shard_on_ranks(2, make)
    shard_on_ranks(1, make)
    shard_on_ranks(
        2, lambda r: make(r).apply(tf.data.experimental.assert_cardinality(4)), presharded=True
    )


@pytest.mark.parametrize("kind", _UNORDERED)
def test_an_unordered_operation_is_found_without_the_private_attribute(monkeypatch, kind) -> None:
    monkeypatch.setattr(pipeline, "is_nondeterministic", lambda dataset: None)
    assert kind in pipeline.unordered_operations(_UNORDERED[kind](Dataset.range(8)))


@pytest.mark.parametrize("deterministic", [None, True])
def test_an_ordered_parallel_pipeline_yields_every_sample_once(deterministic) -> None:
    options = tf.data.Options()
    options.deterministic = False

    def make(_: int) -> Dataset:
        parallel = {"num_parallel_calls": 2, "deterministic": deterministic}
        numbers = Dataset.range(40).interleave(lambda x: Dataset.from_tensors(x), **parallel)
        return numbers.map(lambda x: x, **parallel).batch(3).with_options(options)

    assert flat(joint(shard_on_ranks(2, make))) == list(range(40))


@pytest.mark.parametrize("place", ["outside", "in a function"])
@pytest.mark.parametrize("presharded", [False, True])
def test_ranks_must_not_write_the_same_cache_file(tmp_path, place: str, presharded: bool) -> None:
    def make(path) -> Dataset:
        change = lambda d: d.cache(str(path))  # noqa: E731
        cached = (change if place == "outside" else _nested(change))(Dataset.range(8))
        return cached.apply(tf.data.experimental.assert_cardinality(8)).batch(2)

    shared = tmp_path / "shared"
    for result in on_ranks(2, lambda engine: shard(engine, make(shared), presharded=presharded)):
        with pytest.raises(DataError, match=rf"got {shared} on ranks 0, 1.*hvdtrain\.rank"):
            raise result
    shares = shard_on_ranks(2, lambda rank: make(tmp_path / str(rank)), presharded=presharded)
    expected = [i for i in range(8) for _ in range(1 + presharded)]
    for _ in range(2):  # the second pass reads the files
        assert sorted(flat(joint(shares))) == expected
    assert len(list(tmp_path.glob("[01].index"))) == 2


def test_ranks_may_read_the_same_complete_cache_file(tmp_path) -> None:
    path = str(tmp_path / "complete")
    assert len(list(Dataset.range(8).cache(path))) == 8
    shares = shard_on_ranks(2, lambda _: Dataset.range(8).cache(path).batch(2))
    assert flat(joint(shares)) == list(range(8))


def test_whole_passes_share_a_dataset() -> None:
    (share, _) = shard_on_ranks(2, lambda _: _ids(10, 2).shuffle(5, seed=1))
    passes = [share.begin(Position(epoch=epoch)).dataset for epoch in range(2)]
    assert all(dataset is share.dataset for dataset in passes)
    assert share.begin(Position(epoch=2, start=2)).dataset is not share.dataset


def test_the_notice_recommends_presharded_data() -> None:
    assert "presharded=True" in (shard_on_ranks(2, lambda _: _ids(4, 2))[1].notice or "")
    assert shard_on_ranks(1, lambda _: _ids(4, 2))[0].notice is None


def test_presharded_data_of_unknown_length() -> None:
    with pytest.raises(DataError, match="assert_cardinality"):
        shard_on_ranks(2, lambda _: _ids(8, 2).filter(lambda x, y: True), presharded=True)
    shares = shard_on_ranks(2, lambda rank: _ids(8 + rank, 2).repeat(), presharded=True, steps=3)
    assert [step.ids for step in read(shares[1], limit=6)][4:] == [[8], [0, 1]]
