from __future__ import annotations

import keras
import numpy as np
import pytest

from hvdtrain.data.partition import epoch_order
from hvdtrain.errors import DataError
from tests.trainer.data.ranks import SEED, joint, on_ranks, read, shard, shard_on_ranks


def _arrays(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return x, np.arange(rows)


def _chunks(order, joint_batch: int) -> list[list[int]]:
    ids = [int(sample) for sample in order]
    return [ids[start : start + joint_batch] for start in range(0, len(ids), joint_batch)]


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_joint_steps_equal_steps_of_a_single_process(size: int, shuffle) -> None:
    for rows, batch_size in ((1, 4), (23, 4), (24, 2)):
        shares = shard_on_ranks(
            size, lambda _, rows=rows: _arrays(rows), batch_size=batch_size, shuffle=shuffle
        )
        for epoch in (0, 1):
            for share in shares:
                share.on_epoch_begin(epoch)
            joint_batch = batch_size * size
            order = epoch_order(
                rows, shuffle=shuffle, joint_batch=joint_batch, seed=SEED, epoch=epoch
            )
            assert joint(shares) == _chunks(order, joint_batch)
            for share in shares:
                share.on_epoch_end()


def test_rows_keep_their_targets_and_weights() -> None:
    x, y = _arrays(21)
    weights = np.linspace(0, 1, 21).astype("float32")
    for share in shard_on_ranks(2, lambda _: (x, y, weights), batch_size=4, shuffle=True):
        for step in read(share):
            batch_x, batch_y, batch_weights = step.batch
            rows = np.asarray(batch_y)
            np.testing.assert_array_equal(batch_x, x[rows])
            np.testing.assert_array_equal(batch_weights, weights[rows])


def test_the_shape_is_static_without_a_partial_batch() -> None:
    spec = shard_on_ranks(2, lambda _: _arrays(16), batch_size=4)[1].dataset.element_spec
    assert tuple(spec[0][0].shape) == (4, 3)
    spec = shard_on_ranks(2, lambda _: _arrays(17), batch_size=4)[1].dataset.element_spec
    assert tuple(spec[0][0].shape) == (None, 3)


def test_the_default_batch_size_equals_that_of_keras() -> None:
    share = shard_on_ranks(2, lambda _: _arrays(100))[0]
    assert [step.rows for step in read(share)] == [32, 18]
    assert share.steps == 2
    shares = shard_on_ranks(2, lambda _: _arrays(100), steps=7)
    assert [len(ids) for ids in joint(shares)] == [16] * 6 + [4]


def check_kind(convert) -> None:
    """Check that converted rows are read unchanged."""
    x, y = _arrays(11)
    x[3] = 0  # an empty row of sparse data
    converted = convert(x)
    for share in shard_on_ranks(2, lambda _: (converted, y), batch_size=2, shuffle=True):
        for step in read(share):
            batch_x, batch_y = map(keras.ops.convert_to_numpy, step.batch)
            assert batch_x.dtype == "float32"
            np.testing.assert_array_equal(batch_x, x[batch_y])


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(np.asarray, id="numpy"),
        pytest.param(lambda x: x.astype("float64"), id="float64"),
        pytest.param(keras.ops.convert_to_tensor, id="tensor"),
    ],
)
def test_kinds_of_arrays(convert) -> None:
    check_kind(convert)


def test_nested_inputs_with_none() -> None:
    x, y = _arrays(9)
    share = shard_on_ranks(2, lambda _: ({"a": [x, None], "b": y}, y), batch_size=3)[1]
    step = read(share)[0]
    assert step.ids == [3, 4, 5]
    assert step.batch[0]["a"][1] is None
    assert np.asarray(step.batch[0]["b"]).tolist() == [3, 4, 5]


def test_text_is_read_on_tensorflow_only() -> None:
    text = np.array([str(i) for i in range(9)], dtype=object)
    if keras.backend.backend() == "tensorflow":
        share = shard_on_ranks(2, lambda _: (text, np.arange(9)), batch_size=3)[1]
        assert read(share)[0].batch[0].numpy().tolist() == [b"3", b"4", b"5"]
        return
    for result in on_ranks(2, lambda engine: shard(engine, (text, np.arange(9)))):
        with pytest.raises(DataError, match=r"x must consist of numbers .* got dtype object"):
            raise result


def test_class_weights_become_sample_weights() -> None:
    x, _ = _arrays(6)
    y = np.array([0, 1, 2, 0, 1, 2])
    share = shard_on_ranks(1, lambda _: (x, y), batch_size=6, class_weight={0: 2.0, 2: 0.5})[0]
    assert np.asarray(read(share)[0].batch[2]).tolist() == [2.0, 1.0, 0.5, 2.0, 1.0, 0.5]
    with pytest.raises(ValueError, match="class_weight"):
        shard_on_ranks(1, lambda _: (x, y, y), class_weight={0: 2.0})
    with pytest.raises(ValueError, match="single output"):
        shard_on_ranks(1, lambda _: (x, [y, y]), class_weight={0: 2.0})


def test_different_rows_of_the_same_shape_are_an_error() -> None:
    rows = np.random.default_rng(0).permutation(1000)

    def make(rank: int):
        return (rows[::-1] if rank == 2 else rows).astype("float32")[:, None], rows

    with pytest.raises(DataError, match=r"content of x is .* on ranks 0, 1, .* on rank 2"):
        shard_on_ranks(3, make, batch_size=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:-1], y[:-1]), "number of samples is 10 on rank 0, 9 on rank 1"),
        (lambda x, y: (x.astype("int32"), y), "x is float32 .* int32 .* on rank 1"),
        (lambda x, y: (x[:, :2], y), r"\(3,\) per row on rank 0, .*\(2,\) per row on rank 1"),
        (lambda x, y: ({"a": x}, y), r"x\['a'\]"),
        (lambda x, y: (x,), "y is"),
    ],
)
def test_differences_between_ranks_are_errors_on_all(change, message: str) -> None:
    def run(engine):
        arrays = _arrays(10)
        return shard(engine, change(*arrays) if engine.rank == 1 else arrays, batch_size=2)

    for result in on_ranks(2, run):
        with pytest.raises(DataError, match=message):
            raise result


def test_an_invalid_input_on_one_rank_is_an_error_on_all() -> None:
    def run(engine):
        x, y = _arrays(10)
        return shard(engine, (x, y[:7] if engine.rank == 0 else y))

    invalid, valid = on_ranks(2, run)
    assert isinstance(invalid, ValueError)
    assert "cardinality" in str(invalid)
    assert isinstance(valid, DataError)
    assert "rank 0: ValueError" in str(valid)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (4, {"batch_size": 0}, "batch_size must be .*got 0"),
        (4, {"batch_size": 2.5}, "batch_size must be .*got 2.5"),
        (4, {"steps": 0}, "steps must be .*got 0"),
        (4, {"seed": -1}, "seed must be .*got -1"),
        (4, {"shuffle": "batches"}, "must be True, False or 'batch'"),
        (0, {}, "arrays are empty"),
    ],
)
def test_invalid_arguments(rows: int, options, message: str) -> None:
    with pytest.raises(DataError, match=message):
        shard_on_ranks(1, lambda _: _arrays(rows), **options)
