"""What can't train, or must not, ends in an error on every rank that says why."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.errors import DataError, MismatchError, ModelError, NonFiniteError
from tests.keras.features import X, Y, classifier

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.ranks(1, 2)
def test_not_compiled(world):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    with pytest.raises(ModelError, match=r"not compiled.*model\.compile"):
        world.distribute(model)


@pytest.mark.ranks(1, 2)
def test_not_a_model(world):
    with pytest.raises(ModelError, match="got str"):
        world.distribute("model")


@pytest.mark.ranks(2)
def test_a_model_of_a_strategy(world):
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = classifier()
        with pytest.raises(ModelError, match=r"tf\.distribute, got a OneDeviceStrategy;"):
            world.distribute(model)
    with pytest.raises(ModelError, match=r"tf\.distribute, got a OneDeviceStrategy;"):
        world.distribute(model)


@pytest.mark.ranks(2)
def test_ranks_with_other_layers(world):
    units = 4 + world.rank()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, name="head")])
    model.compile("sgd", LOSS)
    with pytest.raises(MismatchError, match=r"head/kernel.*\(6, 4\) on rank 0.*\(6, 5\) on rank 1"):
        world.distribute(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["learning_rate", "class", "steps"])
def test_ranks_with_other_optimizers_or_settings(world, setting):
    odd = world.rank() == 1
    optimizer = keras.optimizers.SGD(0.2 if odd and setting == "learning_rate" else 0.1)
    if odd and setting == "class":
        optimizer = keras.optimizers.Lion(0.1)
    steps = 2 if odd and setting == "steps" else 1
    model = classifier(optimizer=optimizer, steps_per_execution=steps)
    with pytest.raises(MismatchError, match="on rank 1"):
        world.distribute(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss_scaling", [False, True])
def test_optimizers_that_differ_in_name_only_are_alike(world, loss_scaling):
    for _ in range(world.rank()):
        keras.optimizers.SGD()
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.9))
    if loss_scaling:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    world.distribute(classifier(optimizer=optimizer))


@pytest.mark.ranks(2)
def test_compiled_again_after_distribute(world):
    model = classifier()
    world.distribute(model)
    model.compile("sgd", LOSS)
    with pytest.raises(ModelError, match=r"compiled after hvdtrain\.distribute"):
        model.fit(X, Y, verbose=0)
    world.distribute(model)
    model.fit(X, Y, batch_size=6, verbose=0)


@pytest.mark.ranks(2)
def test_trainable_changed_after_distribute(world):
    model = classifier()
    world.distribute(model)
    model.layers[0].trainable = False
    with pytest.raises(ModelError, match=r"dense\w*/kernel"):
        model.fit(X, Y, verbose=0)


class Halves(keras.Model):
    """Uses its second layer on the chief only."""

    def __init__(self, use_both: bool) -> None:
        super().__init__()
        self.use_both = True
        self.one, self.two = keras.layers.Dense(3, name="one"), keras.layers.Dense(3, name="two")
        self(X[:1])
        self.use_both = use_both

    def call(self, x: Any) -> Any:
        return self.one(x) + (self.two(x) if self.use_both else 0.0)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_none_on_one_rank_only(world):
    model = Halves(world.is_chief())
    model.compile("sgd", LOSS)
    world.distribute(model)
    with pytest.raises(MismatchError, match=r"two/kernel is dense.*rank 0 and None on rank 1"):
        model.fit(X, Y, batch_size=6, verbose=0)


@pytest.mark.ranks(2)
def test_nan_on_one_rank_names_it_everywhere(world):
    model = classifier()
    world.distribute(model)
    x = X.copy()
    x[9] = np.nan  # joint batch 0 of 2 times 6: the second rank's part
    with pytest.raises(NonFiniteError, match=r"dense\w*/kernel \(NaN\).*on rank 1"):
        model.fit(x, Y, batch_size=6, shuffle=False, verbose=0)


@pytest.mark.ranks(2)
def test_ranks_with_other_data(world):
    model = classifier()
    world.distribute(model)
    with pytest.raises(DataError, match=r"presharded"):
        model.fit(X[world.rank() :: 2][:20], Y[world.rank() :: 2][:20], verbose=0)


SCRIPT = """
    import sys
    import keras, numpy as np, hvdtrain
    hvdtrain.init()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    hvdtrain.distribute(model)

    class Trouble(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hvdtrain.rank() == 1 and batch == 2:
                {trouble}

    model.fit(np.zeros((64, 6)), np.zeros((64, 3)), batch_size=4, verbose=0, callbacks=[Trouble()])
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        ("raise ValueError('bad batch')", 1, "rank 1 failed: ValueError: bad batch"),
        ("sys.exit(7)", 7, "rank 1 ended its program"),
    ],
)
def test_trouble_in_user_code_on_one_rank_ends_all(launch, trouble, code, said):
    done = launch(2, SCRIPT.format(trouble=trouble))
    assert done.returncode == code
    assert f"hvdtrain: rank 0 of 2 stops: {said}" in done.stderr
    assert "waiting for it in allreduce(stop_training)" in done.stderr or code == 7
