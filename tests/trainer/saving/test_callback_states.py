"""The conversion of callback states into JSON and arrays."""

import json

import keras
import numpy as np

from hvdtrain.trainer.saving.callback_states import (
    callback_arrays,
    callback_states,
    restore_callbacks,
)


class Custom(keras.callbacks.Callback):
    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def get_state(self):
        return {"value": self.value, "pair": [np.ones(2), np.zeros(3)], "name": "custom"}

    def set_state(self, state):
        self.value = state


def round_trip(before, after):
    plain, arrays = callback_states(before)
    plain = json.loads(json.dumps(plain))
    return restore_callbacks(after, plain, arrays)


def test_the_state_of_keras_callbacks_is_restored():
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


def test_a_custom_callback():
    fresh = Custom()
    round_trip([Custom(np.arange(3))], [fresh])
    np.testing.assert_array_equal(fresh.value["value"], np.arange(3))
    assert [array.tolist() for array in fresh.value["pair"]] == [[1, 1], [0, 0, 0]]
    assert fresh.value["name"] == "custom"


def test_callbacks_of_a_class_are_numbered():
    fresh = [Custom(), Custom()]
    round_trip([Custom(1), Custom(2)], fresh)
    assert [callback.value["value"] for callback in fresh] == [1, 2]
    assert round_trip([Custom(1), Custom(2)], [Custom()]) == ["Custom 2"]


def test_arrays_are_copies():
    array = np.arange(3)
    _, arrays = callback_states([Custom(array)])
    array += 1
    np.testing.assert_array_equal(arrays["callbacks/Custom/value"], [0, 1, 2])
    assert callback_arrays({**arrays, "weights/0000/kernel": np.ones(1)}).keys() == arrays.keys()
