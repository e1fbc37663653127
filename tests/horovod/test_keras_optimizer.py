"""Optimizers with Horovod's options: training on ranks equals what can be worked out by hand."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.errors import ModelError
from hvdtrain.gradients.compression import Compression
from hvdtrain.horovod.keras_optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from hvdtrain.horovod.op_constants import Max, Sum
from hvdtrain.horovod.process_sets import add_process_set, remove_process_set

several = pytest.mark.ranks(1, 3)
ROWS = 24


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([3, rank])
    return rng.normal(size=(ROWS, 4)).astype("float32"), rng.integers(0, 3, ROWS)


def make(optimizer) -> keras.Model:
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model: keras.Model, x, y, batch_size: int) -> list[np.ndarray]:
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def joint() -> tuple[np.ndarray, np.ndarray]:
    """What one process trains on in batches of all ranks' batches."""
    parts = [data(rank) for rank in range(job.size())]
    x, y = (np.concatenate([np.split(part[n], 6) for part in parts], axis=1) for n in (0, 1))
    return x.reshape(-1, 4), y.reshape(-1)


def alike(found, expected, tolerance=1e-5) -> None:
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance)


@several
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.essential),
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"sparse_as_dense": True},
    ],
    ids=str,
)
def test_ranks_train_as_one_process_on_the_joint_batch(world, options):
    """Adam would not notice gradients that are merely scaled."""
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9, clipnorm=0.3)
    found = fit(make(DistributedOptimizer(optimizer, **options)), *data(job.rank()), 4)
    alone = fit(
        make(keras.optimizers.SGD(0.2, momentum=0.9, clipnorm=0.3)), *joint(), 4 * job.size()
    )
    alike(found, alone)


@several
def test_a_sum_is_as_many_means(world):
    found = fit(make(DistributedOptimizer(keras.optimizers.SGD(0.1), op=Sum)), *data(job.rank()), 4)
    alike(found, fit(make(keras.optimizers.SGD(0.1 * job.size())), *joint(), 4 * job.size()))


@several
@pytest.mark.parametrize("average", [False, True])
def test_gradients_of_several_steps(world, average):
    """Added up, or their mean; ranks talk once for all of them."""
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.1),
        backward_passes_per_step=3,
        average_aggregated_gradients=average,
    )
    before = job.collectives().operation
    found = fit(make(optimizer), *data(job.rank()), 4)
    if job.size() > 1:
        assert job.collectives().operation - before == 4
    rate = 0.1 if average else 0.3
    alone = make(keras.optimizers.SGD(rate, gradient_accumulation_steps=3))
    alike(found, fit(alone, *joint(), 4 * job.size()))


@several
def test_smaller_types_on_the_way(world):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), compression=Compression.fp16)
    found = fit(make(optimizer), *data(job.rank()), 4)
    alone = fit(make(keras.optimizers.SGD(0.1)), *joint(), 4 * job.size())
    alike(found, alone, 2e-3)
    if job.size() > 1:
        with pytest.raises(AssertionError):
            alike(found, alone, 1e-7)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scaled", [True, False])
def test_layers_of_a_rank_alone(world, scaled):
    """What is local follows this rank's gradients, whole or divided by the number of ranks."""
    model = make("sgd")
    local = model.layers[1]
    optimizer = PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=[local], scale_local_gradients=scaled
    )
    gradients = [tf.ones_like(v.value) * (job.rank() + 1.0) for v in model.trainable_variables]
    before = model.get_weights()
    optimizer.apply(gradients, model.trainable_variables)
    steps = [float(np.mean(a - b)) / 0.1 for a, b in zip(before, model.get_weights())]
    mine = (job.rank() + 1.0) / (2 if scaled else 1)
    np.testing.assert_allclose(steps, [1.5, 1.5, mine, mine], rtol=1e-5)


@pytest.mark.ranks(3)
def test_within_a_process_set(world):
    pair = add_process_set([0, 1])
    model = make("sgd")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=pair)
    before = model.get_weights()
    gradients = [tf.ones_like(v.value) * (job.rank() + 1.0) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    step = float(np.mean(before[0] - model.get_weights()[0])) / 0.1
    np.testing.assert_allclose(step, 1.5 if job.rank() < 2 else 3.0, rtol=1e-5)
    remove_process_set(pair)


@pytest.mark.ranks(2)
def test_an_overflow_skips_the_step_of_all(world):
    inner = keras.optimizers.SGD(0.1)
    optimizer = DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0))
    model = make("sgd")
    before = model.get_weights()
    worst = np.inf if job.rank() == 1 else 1.0
    gradients = [tf.fill(v.shape, np.float32(worst)) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    alike(model.get_weights(), before, 0)
    # The scale is half of what it was since then.
    gradients = [2.0 * tf.ones_like(v.value) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    np.testing.assert_allclose(before[0] - model.get_weights()[0], 0.1, rtol=1e-3)


@several
def test_it_is_saved_as_the_plain_one(world, tmp_path):
    """And load_model makes it average again."""
    model = make(DistributedOptimizer(keras.optimizers.Adam(0.01)))
    fit(model, *data(job.rank()), 4)
    file = tmp_path / f"{job.rank()}.keras"
    model.save(file)
    plain = keras.saving.load_model(file)
    assert type(plain.optimizer) is keras.optimizers.Adam
    loaded = load_model(file)
    fit(loaded, *data(job.rank()), 4)
    mine = np.concatenate([weight.reshape(-1) for weight in loaded.get_weights()])
    chiefs = job.collectives().broadcast(mine)
    np.testing.assert_array_equal(mine, chiefs)


def test_what_does_not_fit_together(world):
    sgd = keras.optimizers.SGD
    with pytest.raises(ModelError, match="received str"):
        DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="Received op=Max; expected Average or Sum"):
        DistributedOptimizer(sgd(), op=Max)
    with pytest.raises(ModelError, match="has gradient_accumulation_steps=2; expected a new one"):
        DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=3)
    by_variable = keras.optimizers.MultiOptimizer(lambda variable: sgd())
    with pytest.raises(ModelError, match="MultiOptimizer has no optimizers yet"):
        DistributedOptimizer(by_variable)
    with pytest.raises(ValueError, match="Received int among local_layers"):
        PartialDistributedOptimizer(sgd(), local_layers=[3])
    with pytest.raises(ModelError, match="legacy_opts=True"):
        load_model("model.keras", legacy_opts=True)
