"""Saved and restored random states."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.trainer.saving.random_state import random_state, restore_random_state


@pytest.fixture(autouse=True)
def restore_state():
    before = random_state()
    yield
    restore_random_state(before)


def draw() -> list[float]:
    """Draw from every generator.

    Gaussian numbers are generated in pairs, so an odd number of them is drawn.
    """
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()]
    return [*map(float, numbers), float(tf.random.uniform([])), float(keras.random.normal([]))]


@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_every_generator_is_restored(drawn_before):
    keras.utils.set_random_seed(7)
    for _ in range(drawn_before):
        draw()
    state = random_state()
    expected = [draw()]
    random_state()  # doesn't draw
    expected.append(draw())
    keras.utils.set_random_seed(8)
    draw()
    restore_random_state(state)
    assert [draw(), draw()] == expected


def test_all_states_have_the_same_shapes():
    """Ranks exchange the states as bytes, so the shapes must be equal."""
    keras.utils.set_random_seed(7)
    shapes = {name: (array.shape, array.dtype) for name, array in random_state().items()}
    draw()
    assert {name: (array.shape, array.dtype) for name, array in random_state().items()} == shapes
