"""The structure of batches, compared with Keras in a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.trainer.data.batch_structure import leaf_names, row_bytes, signature
from tests.trainer.data.ranks import shard_on_ranks

A = np.arange(12, dtype="float32").reshape(6, 2)
B = A + 100


class Pair(NamedTuple):
    image: Any
    text: Any


class Batches(keras.utils.PyDataset):
    def __init__(self, make: Callable[[np.ndarray, np.ndarray], Any]) -> None:
        super().__init__()
        self._make = make

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = slice(2 * index, 2 * index + 2)
        return self._make(A[rows], B[rows])


def _dataset(structure: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(structure).batch(2)


def _generator(make: Callable[[np.ndarray, np.ndarray], Any]) -> Iterator[Any]:
    return (make(A[n : n + 2], B[n : n + 2]) for n in (0, 2, 4))


# Each function returns x, or a tuple of positional arguments for ``evaluate``.
INPUTS: dict[str, Callable[[], Any]] = {
    "array": lambda: A,
    "dict of arrays": lambda: {"b": B, "a": A},
    "list of arrays": lambda: [A, B],
    "named tuple of arrays": lambda: (Pair(A, B),),
    "arrays and targets": lambda: (A, {"y": B}),
    "arrays and weights": lambda: ([A, B], A, A[:, 0]),
    "dataset": lambda: _dataset(A),
    "dataset of tuples of one": lambda: _dataset((A,)),
    "dataset of dicts": lambda: _dataset({"b": B, "a": (A, B)}),
    "dataset of named tuples": lambda: _dataset(Pair(A, B)),
    "dataset of nested named tuples": lambda: _dataset((Pair(A, B), B)),
    "dataset of three": lambda: _dataset((A, B, A[:, 0])),
    "dataset of four": lambda: _dataset((A, B, A, B)),
    "dataset of strings": lambda: _dataset({"a": A, "b": tf.strings.as_string(B)}),
    "dataset of nested pairs": lambda: _dataset(((A, B),)),
    "dataset with None": lambda: _dataset(A).map(lambda a: ({"a": a, "b": None}, a)),
    "dataset without targets": lambda: _dataset(A).map(lambda a: (a, None, a[:, 0])),
    "PyDataset of arrays": lambda: Batches(lambda a, b: a),
    "PyDataset of tuples of one": lambda: Batches(lambda a, b: (b,)),
    "PyDataset of dicts": lambda: Batches(lambda a, b: {"b": b, "a": a}),
    "PyDataset of named tuples": lambda: Batches(Pair),
    "PyDataset of lists": lambda: Batches(lambda a, b: [(a, b), b]),
}
GENERATORS: dict[str, Callable[[], Any]] = {
    "generator of pairs": lambda: _generator(lambda a, b: ({"b": b, "a": a}, b)),
    "generator of named tuples": lambda: _generator(Pair),
    "generator of four": lambda: _generator(lambda a, b: (a, b, a, b)),
}


def _keras_batches(given: Any) -> list[Any]:
    """Return the batches that Keras passes to ``test_step`` in a single process."""
    batches = []

    class Records(keras.Model):
        def test_step(self, data: Any) -> Any:
            batches.append(data)
            return {"loss": tf.zeros([])}

    model = Records()
    model.compile(run_eagerly=True)
    arguments = given if type(given) is tuple else (given,)
    weights = {"sample_weight": arguments[2]} if len(arguments) == 3 else {}
    model.evaluate(*arguments[:2], **weights, batch_size=2, steps=3, verbose=0)
    return batches


@pytest.mark.parametrize("name", [*INPUTS, *GENERATORS])
@pytest.mark.parametrize("size", [1, 3])
def test_batches_have_the_structure_of_keras(name: str, size: int) -> None:
    make = {**INPUTS, **GENERATORS}[name]
    options: dict[str, Any] = {} if "dataset" in name.lower() else {"batch_size": 2}
    presharded = name in GENERATORS
    if presharded:
        options = {"presharded": True, "steps": 3}
    single = _keras_batches(make())
    for rank, share in enumerate(shard_on_ranks(size, lambda _: make(), **options)):
        expected = single if presharded else single[rank::size]
        batches = [step.batch for step in share.dataset.take(3) if step.rows > 0]
        assert len(batches) == len(expected)
        for batch, keras_batch in zip(batches, expected):
            keras.tree.assert_same_structure(batch, keras_batch)
            tf.nest.assert_same_structure(batch, keras_batch)
            for ours, theirs in zip(keras.tree.flatten(batch), keras.tree.flatten(keras_batch)):
                assert (ours is None) == (theirs is None)
                assert ours is None or (ours.dtype, ours.numpy().tolist()) == (
                    theirs.dtype,
                    theirs.numpy().tolist(),
                )


def test_leaf_names() -> None:
    assert leaf_names(A) == ["x"]
    assert leaf_names({"b": B, "a": [A, B]}) == ["x['a'][0]", "x['a'][1]", "x['b']"]
    assert leaf_names((A, None, B)) == ["x", "y", "sample_weight"]
    assert leaf_names((A, B, A, (B,))) == ["part 0", "part 1", "part 2", "part 3[0]"]
    spec = (keras.KerasTensor([None, 2]), None)
    assert signature(spec) == {"x": "float32 of shape (2,) per row", "y": "None"}


def test_row_bytes() -> None:
    spec = ({"a": keras.KerasTensor([None, 2, 3]), "b": None}, keras.KerasTensor([4], "int64"))
    assert row_bytes(spec) == 2 * 3 * 4 + 8


def test_a_different_structure_on_one_rank_is_an_error() -> None:
    def make(rank: int) -> tf.data.Dataset:
        return _dataset({"a": A} if rank else {"a": A, "b": B})

    with pytest.raises(DataError, match=r"x\['b'\]"):
        shard_on_ranks(2, make)
