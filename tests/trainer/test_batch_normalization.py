"""Normalization over the batches of all ranks, if the ranks have different numbers of rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain.trainer.batch_normalization import SyncBatchNormalization
from tests.trainer.equivalence import check_close
from tests.trainer.own_steps import minimize, own_steps

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

pytestmark = [pytest.mark.ranks(2), pytest.mark.backends("tensorflow", "torch", "jax")]


@own_steps
class OwnStep(keras.Model):
    """A model whose optimizer multiplies the gradients, because hvdtrain can't change its loss."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def losses() -> Any:
            y_pred = self(x, training=True)
            return self.compute_loss(x, y, y_pred), y_pred

        loss, _ = minimize(self, self.optimizer, self.trainable_weights, losses)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [keras.Model, OwnStep], ids=["step of Keras", "own step"])
def test_gradients_cross_ranks_with_the_weight_of_their_loss(world, kind):
    """The loss of a rank depends on the rows of the other rank, through mean and variance."""
    models = []
    for layer in (SyncBatchNormalization, keras.layers.BatchNormalization):
        keras.utils.set_random_seed(1)
        start = keras.Input((4,))
        inner = layer(momentum=0.5)(keras.layers.Dense(6, activation="tanh")(start))
        model = kind(start, keras.layers.Dense(1)(inner))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        models.append(model)
    together, alone = models
    world.distribute(together)
    own = slice(0, 3) if world.rank() == 0 else slice(3, 20)
    for _ in range(3):
        together.train_on_batch(X[own], Y[own])
        alone.train_on_batch(X, Y)
    models = together, alone
    found, expected = ([v.numpy() for v in model.trainable_variables] for model in models)
    check_close(found, expected)
