"""The variables that are sent when the chief broadcasts its weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from hvdtrain import world as state
from hvdtrain.collectives.engine_core import FinishedOperation
from hvdtrain.trainer.model_sync import broadcast_weights


@pytest.mark.ranks(2)
def test_only_variables_that_differ_are_sent(world) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    more = keras.Variable([1.0, float("nan")])
    chiefs = [np.asarray(variable.numpy()) for variable in (*model.variables, more)]
    collectives = state.collectives()
    seen: list[str] = []

    def see(operation: FinishedOperation) -> None:
        if operation.title.startswith("broadcast"):
            seen.append(operation.title)

    digests = "broadcast(digests of variables)"
    collectives.observers.append(see)
    try:
        broadcast_weights(model, collectives, [more])
        if world.rank() == 1:
            more.assign([-1.0, 2.0])
        broadcast_weights(model, collectives, [more])
        broadcast_weights(model, collectives, [more])
    finally:
        collectives.observers.remove(see)
    assert seen == [digests, digests, "broadcast(variable 2)", digests]
    for variable, chief in zip((*model.variables, more), chiefs):
        np.testing.assert_array_equal(variable.numpy(), chief)
