"""The seed that all ranks use unless the program has set one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from hvdtrain.frameworks.tensorflow import random_seed


@pytest.fixture
def no_seed() -> Iterator[None]:
    before = context.global_seed()
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(before)


@pytest.mark.usefixtures("no_seed")
def test_set_unless_set_sets_the_seed() -> None:
    random_seed.set_unless_set(7)
    values = tf.random.uniform([4]).numpy().tolist()
    tf.random.set_seed(7)
    assert tf.random.uniform([4]).numpy().tolist() == values


@pytest.mark.usefixtures("no_seed")
def test_the_seed_of_the_program_is_unchanged() -> None:
    tf.random.set_seed(1)
    values = tf.random.uniform([4]).numpy().tolist()
    tf.random.set_seed(1)
    random_seed.set_unless_set(7)
    assert tf.random.uniform([4]).numpy().tolist() == values
