"""Models that are built when they get their first data."""

import keras
import numpy as np
import pytest

from hvdtrain.errors import ModelError
from tests.trainer.equivalence import alike, distance, weights
from tests.trainer.features import X, Y
from tests.trainer.patterns.pattern import LOSS, Batches, batches

every_backend = pytest.mark.backends("tensorflow", "torch", "jax")


def bare(seed=3):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), LOSS)
    return model


FIRST = {
    "fit on a pipeline": lambda model, size: model.fit(
        batches(size, X, Y), shuffle=False, verbose=0
    ),
    "fit on a PyDataset": lambda model, size: model.fit(
        Batches(size, X, Y), shuffle=False, verbose=0
    ),
    "fit on a generator": lambda model, size: model.fit(
        ((X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size)),
        steps_per_epoch=4,  # if unknown, Keras counts one update too many
        verbose=0,
    ),
    "evaluate": lambda model, size: model.evaluate(X, Y, size, verbose=0),
    "predict": lambda model, size: model.predict(X, size, verbose=0),
    "train_on_batch": lambda model, size: model.train_on_batch(X[:size], Y[:size]),
}


@every_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", FIRST)
def test_the_model_is_distributed_before_the_first_step(world, first):
    check_distributed(world, first)


@pytest.mark.ranks(1)
def test_one_rank_builds_the_model(world):
    check_distributed(world, "fit on a pipeline")


def check_distributed(world, first):
    alone, together = bare(), bare(3 + world.rank())
    world.distribute(together)
    each = first == "train_on_batch"  # the same batch on both ranks
    FIRST[first](together, 6)
    assert alike(together)
    if world.is_chief():
        FIRST[first](alone, 6 if each else 6 * world.size())
        if not alone.optimizer.built:
            alone.optimizer.build(alone.trainable_variables)
        assert distance(together, weights(alone)) <= 1e-5


@every_backend
@pytest.mark.ranks(2)
def test_data_that_do_not_fit_the_model_are_an_error(world):
    model = keras.Sequential([keras.layers.Conv2D(2, 3), keras.layers.Dense(3)])
    model.compile("sgd", LOSS)
    world.distribute(model)
    with pytest.raises(ModelError, match=r"can't be built from its data: .*min_ndim=4"):
        model.fit(X, Y, verbose=0)


@every_backend
@pytest.mark.ranks(2)
def test_applying_gradients_to_an_unbuilt_model_is_an_error(world):
    model = bare()
    world.distribute(model)
    model(X[:1])
    gradients = [np.ones(weight.shape, "float32") for weight in model.trainable_weights]
    with pytest.raises(ModelError, match="weights are not equal on all ranks yet"):
        model.optimizer.apply(gradients, model.trainable_weights)
    with pytest.raises(ModelError, match="weights are not equal on all ranks yet"):
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights))
    world.distribute(model)
    model.optimizer.apply(gradients, model.trainable_weights)
    assert alike(model)


@every_backend
@pytest.mark.ranks(2)
def test_layers_that_are_never_built_are_an_error(world):
    class Holder(keras.Model):
        def __init__(self):
            super().__init__()
            self.part = keras.Sequential([keras.layers.Dense(3)])

        def train_step(self, data):
            pytest.fail("a step has run")

    model = Holder()
    model.compile("sgd")
    with pytest.raises(ModelError, match=r"not built: .*sequential.* no variables.*keras\.Input"):
        world.distribute(model)
