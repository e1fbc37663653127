"""The optimizer's state goes to the servers and comes back."""

import keras
import numpy as np
import pytest

from hvdtrain.errors import ModelError
from hvdtrain.keras.served.server_shards import ServerOptimizerState
from hvdtrain.parameter_server.optimizer_state import AVERAGES
from hvdtrain.parameter_server.sharding import shard_variables, specs_of


def trained(seed):
    """A model that has taken some steps, each with other weights."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.6), "mse")
    for _ in range(3):
        model.optimizer.apply([v + 1.0 for v in model.trainable_variables], model.trainable_weights)
    return model


def state_of(model):
    shards = shard_variables(specs_of(model.trainable_variables), 2)
    return ServerOptimizerState(model.optimizer, shards)


def averages_of(model):
    return [v.numpy() for v in model.optimizer._model_variables_moving_average]


def test_averages_go_to_the_servers_and_come_back():
    one, other = trained(1), trained(2)
    wanted = averages_of(one)
    assert not np.allclose(wanted[0], averages_of(other)[0])
    there, back = state_of(one), state_of(other)
    room = back.buffers()
    for place, state in zip(room, there.take()):
        place[...] = state
    back.put(room)
    back.finalize()
    for found in (averages_of(other), [v.numpy() for v in other.trainable_variables]):
        for value, expected in zip(found, wanted):
            np.testing.assert_array_equal(value, expected)
    # Otherwise the next average would begin anew.
    assert int(there.optimizer.iterations.numpy()) == 3


def test_averages_under_another_name_are_missed():
    """Otherwise the weights themselves would be validated, and stay."""
    model = trained(1)
    state = state_of(model)
    states = state.take()
    held = vars(model.optimizer)
    held["_renamed"] = held.pop("_model_variables_moving_average")
    with pytest.raises(ModelError, match=r"_model_variables_moving_average|which has no attribute"):
        state.put(states, only=AVERAGES)
    with pytest.raises(ModelError, match=r"lacks Adam\._model_variables_moving_average, which"):
        state.finalize()
