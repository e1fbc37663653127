"""What is drawn after restoring is what was drawn after saving."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.keras.saving.random_state import random_state, restore_random_state


@pytest.fixture(autouse=True)
def undo():
    before = random_state()
    yield
    restore_random_state(before)


def draw() -> list[float]:
    """From every generator, an odd number of Gaussian ones, of which a pair is made at a time."""
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()]
    return [*map(float, drawn), float(tf.random.uniform([])), float(keras.random.normal([]))]


@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_each_generator_goes_on(drawn_before):
    keras.utils.set_random_seed(7)
    for _ in range(drawn_before):
        draw()
    state = random_state()
    expected = [draw(), draw()]
    keras.utils.set_random_seed(8)
    draw()
    restore_random_state(state)
    assert [draw(), draw()] == expected


def test_the_arrays_are_alike_whatever_the_state():
    """Ranks exchange them as one row of bytes."""
    keras.utils.set_random_seed(7)
    one = random_state()
    draw()
    other = random_state()
    assert {k: (a.shape, a.dtype) for k, a in one.items()} == {
        k: (a.shape, a.dtype) for k, a in other.items()
    }


def test_looking_draws_nothing():
    keras.utils.set_random_seed(7)
    expected = draw()
    keras.utils.set_random_seed(7)
    random_state()
    assert draw() == expected
