"""What all ranks go on with, of what a round began with and the average at its end."""

import keras
import numpy as np
import pytest

from hvdtrain.keras.local_sgd.weight_averaging import OuterOptimizer


@pytest.mark.parametrize(("rate", "momentum"), [(0.75, 0.875), (0.5, 0.0), (1.0, 0.5)])
def test_it_is_kerass_sgd_with_nesterov_momentum(rate, momentum):
    rng = np.random.default_rng(1)
    outer = OuterOptimizer(learning_rate=rate, momentum=momentum)
    sgd = keras.optimizers.SGD(rate, momentum=momentum, nesterov=bool(momentum))
    theirs = keras.Variable(rng.normal(size=(3, 4)), dtype="float64")
    mine, velocity = theirs.numpy(), np.zeros((3, 4))
    for _ in range(5):
        average = mine + rng.normal(size=(3, 4))
        sgd.apply([mine - average], [theirs])
        mine, velocity = outer.step(mine, average, velocity)
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-12)


def test_a_rate_of_one_takes_the_average():
    assert OuterOptimizer().takes_average
    assert not OuterOptimizer(learning_rate=0.7).takes_average
    assert not OuterOptimizer(momentum=0.9).takes_average
    anchor, average = np.array([1.0, 2.0]), np.array([3.0, -1.0])
    np.testing.assert_array_equal(OuterOptimizer().step(anchor, average, None)[0], average)
