"""Errors on every rank for models, data and programs that can't train."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.errors import MismatchError, ModelError, NonFiniteError
from tests.trainer.features import X, Y, classifier

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.ranks(1, 2)
def test_arguments_other_than_a_compiled_model_are_errors(world):
    with pytest.raises(ModelError, match=r"not compiled.*model\.compile"):
        world.distribute(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    with pytest.raises(ModelError, match="got str"):
        world.distribute("model")


@pytest.mark.ranks(2)
def test_a_model_of_a_tf_distribute_strategy_is_an_error(world):
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = classifier()
        with pytest.raises(ModelError, match=r"tf\.distribute's OneDeviceStrategy;"):
            world.distribute(model)
    with pytest.raises(ModelError, match=r"tf\.distribute's OneDeviceStrategy;"):
        world.distribute(model)


@pytest.mark.ranks(2)
def test_compiling_after_distribute_is_an_error(world):
    model = classifier()
    world.distribute(model)
    model.compile("sgd", LOSS)
    with pytest.raises(ModelError, match=r"compiled after hvdtrain\.distribute"):
        model.fit(X, Y, verbose=0)
    world.distribute(model)
    model.fit(X, Y, batch_size=6, verbose=0)


@pytest.mark.ranks(2)
def test_changing_trainable_after_distribute_is_an_error(world):
    model = classifier()
    world.distribute(model)
    model.layers[0].trainable = False
    with pytest.raises(ModelError, match=r"dense\w*/kernel"):
        model.fit(X, Y, verbose=0)


class Halves(keras.Model):
    """A model that uses its second layer on the chief only."""

    def __init__(self, use_both: bool) -> None:
        super().__init__()
        self.use_both = True
        self.one, self.two = keras.layers.Dense(3, name="one"), keras.layers.Dense(3, name="two")
        self(X[:1])
        self.use_both = use_both

    def call(self, x: Any) -> Any:
        return self.one(x) + (self.two(x) if self.use_both else 0.0)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_none_on_one_rank_is_an_error(world):
    model = Halves(world.is_chief())
    model.compile("sgd", LOSS)
    world.distribute(model)
    with pytest.raises(MismatchError, match=r"two/kernel is dense.*rank 0 and None on rank 1"):
        model.fit(X, Y, batch_size=6, verbose=0)


@pytest.mark.ranks(2)
def test_nan_on_one_rank_is_an_error_on_all(world):
    model = classifier()
    world.distribute(model)
    x = X.copy()
    x[9] = np.nan  # in the second rank's part of the first joint batch
    with pytest.raises(NonFiniteError, match=r"dense\w*/kernel \(NaN\).*on rank 1"):
        model.fit(x, Y, batch_size=6, shuffle=False, verbose=0)


SCRIPT = """
    import sys
    import keras, numpy as np, hvdtrain
    hvdtrain.init()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    hvdtrain.distribute(model)

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hvdtrain.rank() == 1 and batch == 2:
                {statement}

    model.fit(np.zeros((64, 6)), np.zeros((64, 3)), batch_size=4, verbose=0, callbacks=[Fails()])
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("statement", "code", "reason"),
    [
        ("raise ValueError('bad batch')", 1, "rank 1 failed: ValueError: bad batch"),
        ("sys.exit(7)", 7, "rank 1 ended its program"),
    ],
)
def test_a_rank_that_fails_in_user_code_ends_all_ranks(launch, statement, code, reason):
    done = launch(2, SCRIPT.format(statement=statement))
    assert done.returncode == code
    assert f"hvdtrain: rank 0 of 2 stops: {reason}" in done.stderr
    assert "waiting for it in allreduce(stop_training)" in done.stderr or code == 7
