"""What callbacks keep, to JSON and arrays and back."""

import json

import keras
import numpy as np

from hvdtrain.keras.saving.callback_states import (
    callback_states,
    kept_by_callbacks,
    restore_callbacks,
)


class Own(keras.callbacks.Callback):
    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def get_state(self):
        return {"value": self.value, "pair": [np.ones(2), np.zeros(3)], "name": "own"}

    def set_state(self, state):
        self.value = state


def round_trip(before, after):
    plain, arrays = callback_states(before)
    plain = json.loads(json.dumps(plain))
    return restore_callbacks(after, plain, arrays)


def test_keras_callbacks_get_their_counters_back():
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    stopping.wait, stopping.best, stopping.best_epoch = 2, np.float32(0.5), 3
    stopping.best_weights = [np.arange(4.0), np.array(7)]
    plateau = keras.callbacks.ReduceLROnPlateau("loss")
    plateau.wait, plateau.cooldown_counter = 4, 1
    fresh = [keras.callbacks.ReduceLROnPlateau("loss"), keras.callbacks.EarlyStopping("loss")]
    assert round_trip([stopping, plateau], fresh) == []
    assert (fresh[0].wait, fresh[0].cooldown_counter) == (4, 1)
    assert (fresh[1].wait, fresh[1].best, fresh[1].best_epoch) == (2, 0.5, 3)
    np.testing.assert_array_equal(fresh[1].best_weights[0], np.arange(4.0))
    np.testing.assert_array_equal(fresh[1].best_weights[1], np.array(7))


def test_a_callback_of_ones_own():
    fresh = Own()
    round_trip([Own(np.arange(3))], [fresh])
    np.testing.assert_array_equal(fresh.value["value"], np.arange(3))
    assert [array.tolist() for array in fresh.value["pair"]] == [[1, 1], [0, 0, 0]]
    assert fresh.value["name"] == "own"


def test_two_of_a_class_keep_their_order():
    fresh = [Own(), Own()]
    round_trip([Own(1), Own(2)], fresh)
    assert [callback.value["value"] for callback in fresh] == [1, 2]


def test_one_that_is_gone_is_named():
    assert round_trip([Own(1), Own(2)], [Own()]) == ["Own 2"]


def test_arrays_are_copies():
    """A thread writes them while training goes on."""
    array = np.arange(3)
    _, arrays = callback_states([Own(array)])
    array += 1
    np.testing.assert_array_equal(arrays["callbacks/Own/value"], [0, 1, 2])


def test_arrays_of_callbacks_are_told_from_others():
    _, arrays = callback_states([Own(np.arange(3))])
    assert kept_by_callbacks({**arrays, "weights/0000/kernel": np.ones(1)}).keys() == arrays.keys()
