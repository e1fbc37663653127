"""The shared seed yields to the program's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from hvdtrain.tensorflow import random_seed


@pytest.fixture
def no_seed() -> Iterator[None]:
    before = context.global_seed()
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(before)


@pytest.mark.usefixtures("no_seed")
def test_it_sets_what_the_program_would() -> None:
    random_seed.set_unless_set(7)
    ours = tf.random.uniform([4]).numpy().tolist()
    tf.random.set_seed(7)
    assert tf.random.uniform([4]).numpy().tolist() == ours


@pytest.mark.usefixtures("no_seed")
def test_a_seed_of_the_programs_own_stays_and_nothing_is_drawn() -> None:
    tf.random.set_seed(1)
    theirs = tf.random.uniform([4]).numpy().tolist()
    tf.random.set_seed(1)
    random_seed.set_unless_set(7)
    assert tf.random.uniform([4]).numpy().tolist() == theirs
