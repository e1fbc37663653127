"""The order of pipelines that shuffle, after a restart and in a repeated pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.trainer.data.tensorflow.pipeline import PipelinePasses

# Each pipeline takes some tenths of a second.
pytestmark = pytest.mark.slow

Dataset = tf.data.Dataset
EPOCH = 2
ROWS = 30


def _shuffled() -> Dataset:
    return Dataset.range(ROWS).shuffle(ROWS, seed=3)


def _within_a_function() -> Dataset:
    inner = _shuffled()
    return Dataset.range(2).flat_map(lambda _: inner)


def _many_parts() -> Dataset:
    dataset = _shuffled().skip(1).take(28).filter(lambda i: i != 5).unique()
    dataset = dataset.interleave(Dataset.from_tensors, cycle_length=2, num_parallel_calls=2)
    dataset = dataset.scan(tf.constant(0, tf.int64), lambda last, i: (i, i)).shard(1, 0)
    dataset = dataset.take_while(lambda i: i < ROWS).batch(5, num_parallel_calls=2).rebatch(3)
    dataset = dataset.unbatch().window(4).flat_map(lambda part: part).ignore_errors()
    dataset = Dataset.zip(dataset, Dataset.range(ROWS)).map(lambda i, _: i)
    return dataset.padded_batch(4).with_options(tf.data.Options())


# A pipeline, whether creating an iterator draws the next order, and whether a pass is repeatable.
PIPELINES: dict[str, tuple[Callable[[], Dataset], bool, bool]] = {
    "shuffle": (_shuffled, True, True),
    "batch": (lambda: _shuffled().batch(4).prefetch(2), True, True),
    "map": (lambda: _shuffled().map(lambda i: i + 1, num_parallel_calls=2), True, True),
    "enumerate": (lambda: _shuffled().enumerate().map(lambda _, i: i), True, True),
    "two": (lambda: _shuffled().batch(3).shuffle(9, seed=4).unbatch(), False, False),
    "many parts": (_many_parts, True, True),
    "files": (lambda: _shuffled().interleave(Dataset.from_tensors), True, True),
    "cache": (lambda: Dataset.range(ROWS).cache().shuffle(ROWS, seed=3), True, True),
    "into a cache": (lambda: _shuffled().cache(), False, True),
    "around a cache": (lambda: _shuffled().cache().shuffle(ROWS, seed=5), False, False),
    "repeat": (lambda: _shuffled().repeat(2), False, True),
    "concatenate": (lambda: _shuffled().concatenate(_shuffled()), False, False),
    "in a function": (_within_a_function, False, False),
}


def _ids(dataset: Dataset) -> list[int]:
    return [int(i) for i in tf.concat([tf.reshape(element, [-1]) for element in dataset], 0)]


@pytest.fixture(autouse=True)
def global_seed() -> None:
    """Set the global seed, on which the order of every new dataset depends."""
    tf.random.set_seed(1)


def _orders(make: Callable[[], Dataset], passes: int) -> list[list[int]]:
    dataset = make()
    return [_ids(dataset) for _ in range(passes)]


def _resumed(make: Callable[[], Dataset]) -> list[list[int]]:
    tf.random.set_seed(1)
    passes = PipelinePasses(make())
    passes.catch_up(EPOCH)
    epochs = (EPOCH, EPOCH + 1)
    return [_ids(passes.begin(epoch, within=False, repeatable=False)) for epoch in epochs]


@pytest.mark.more
def test_a_new_process_continues_with_the_same_order(
    run_command: Any, forked_python: list[str]
) -> None:
    code = (
        "import json; from tests.trainer.data.tensorflow import test_pipeline as t; "
        "print(json.dumps({name: t._resumed(make) for name, (make, *_) in t.PIPELINES.items()}))"
    )
    done = run_command([*forked_python, "-c", code], timeout_s=110)
    assert done.returncode == 0, done
    orders = json.loads(done.stdout.splitlines()[-1])
    for name, (make, *_) in PIPELINES.items():
        assert orders[name] == _orders(make, EPOCH + 2)[EPOCH:], name


@pytest.mark.parametrize("name", PIPELINES)
def test_the_kind_of_pipeline_is_detected(name: str) -> None:
    make, at_once, repeatable = PIPELINES[name]
    passes = PipelinePasses(make())
    assert (passes.changes, passes.at_once, passes.repeatable) == (True, at_once, repeatable)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(ROWS).batch(4).repeat(2),
        lambda: Dataset.range(ROWS).enumerate(),
        lambda: Dataset.range(ROWS).shuffle(ROWS, seed=3, reshuffle_each_iteration=False),
        lambda: Dataset.from_tensor_slices([1, 2, 3]).map(lambda i: i + 1),
    ],
)
def test_a_pipeline_without_shuffling_is_used_directly(make) -> None:
    dataset = make()
    passes = PipelinePasses(dataset)
    assert not passes.changes
    for _ in range(2):
        assert passes.begin(0, within=True, repeatable=True) is dataset


@pytest.mark.parametrize("name", [name for name, entry in PIPELINES.items() if entry[2]])
def test_a_repeated_pass_has_the_same_order(name: str) -> None:
    make = PIPELINES[name][0]
    first, second, third = _orders(make, 3)
    passes = PipelinePasses(make())
    for epoch, order in ((0, first), (1, second)):
        abandoned = iter(passes.begin(epoch, within=False, repeatable=True))
        next(abandoned)
        for _ in range(2):
            assert _ids(passes.begin(epoch, within=True, repeatable=True)) == order
    assert _ids(passes.begin(2, within=False, repeatable=False)) == third


@pytest.mark.parametrize("name", [name for name, entry in PIPELINES.items() if not entry[2]])
def test_a_pass_that_cant_be_repeated_is_an_error(name: str) -> None:
    make = PIPELINES[name][0]
    passes = PipelinePasses(make())
    assert not passes.repeatable
    assert _ids(passes.begin(0, within=False, repeatable=True)) == _orders(make, 1)[0]
    with pytest.raises(DataError, match=r"started again.*reshuffle_each_iteration=False"):
        passes.begin(0, within=True, repeatable=True)


def test_repeating_a_pass_in_a_different_order_is_an_error() -> None:
    passes = PipelinePasses(_shuffled())
    for epoch in (0, 1):
        passes.begin(epoch, within=False, repeatable=False)
    for epoch in (0, 1):
        with pytest.raises(DataError, match=rf"epoch {epoch} .*can't be started again"):
            passes.begin(epoch, within=True, repeatable=True)


def test_a_second_training_with_the_same_dataset_continues_its_orders() -> None:
    dataset, orders = _shuffled(), _orders(_shuffled, 4)
    first = PipelinePasses(dataset)
    results = [_ids(first.begin(epoch, within=False, repeatable=False)) for epoch in (0, 1)]
    second = PipelinePasses(dataset)
    with pytest.raises(DataError, match=r"pass 1 .*2 passes were already started"):
        second.catch_up(1)
    second.catch_up(2)
    results.append(_ids(second.begin(2, within=False, repeatable=False)))
    # This is also the case if it starts from the beginning.
    results.append(_ids(PipelinePasses(dataset).begin(0, within=False, repeatable=False)))
    assert results == orders


def test_resuming_within_an_epoch_catches_up() -> None:
    passes = PipelinePasses(_shuffled())
    assert _ids(passes.begin(EPOCH, within=True, repeatable=False)) == _orders(_shuffled, 3)[EPOCH]


def test_catching_up_with_an_endless_pipeline_is_an_error() -> None:
    passes = PipelinePasses(_shuffled().repeat())
    passes.catch_up(0)
    with pytest.raises(DataError, match="endless"):
        passes.catch_up(1)


def test_catching_up_with_a_cache_file(tmp_path: Path) -> None:
    def make(name: str) -> Callable[[], Dataset]:
        return lambda: (
            Dataset.range(ROWS).cache(str(tmp_path / name)).shuffle(ROWS, seed=3).batch(4)
        )

    assert _resumed(make("resumed")) == _orders(make("plain"), EPOCH + 2)[EPOCH:]


def test_random_datasets_may_change_in_each_pass() -> None:
    for changes in (False, True):
        numbers = tf.data.Dataset.random(seed=1, rerandomize_each_iteration=changes)
        assert PipelinePasses(numbers.take(4).batch(2)).changes == changes
