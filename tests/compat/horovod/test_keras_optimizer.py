"""Horovod's Keras optimizers compared with training in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.compat.horovod.compression import Compression
from hvdtrain.compat.horovod.keras_optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from hvdtrain.compat.horovod.process_sets import add_process_set, remove_process_set
from hvdtrain.compat.horovod.reduction_arguments import Max, Sum
from hvdtrain.errors import ModelError

several = pytest.mark.ranks(1, 2)
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


def joint_data() -> tuple[np.ndarray, np.ndarray]:
    """Return data whose batches are the concatenated batches of all ranks."""
    parts = [data(rank) for rank in range(job.size())]
    x, y = (np.concatenate([np.split(part[n], 6) for part in parts], axis=1) for n in (0, 1))
    return x.reshape(-1, 4), y.reshape(-1)


def assert_close(weights, expected, tolerance=1e-5) -> None:
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, value, rtol=tolerance, atol=tolerance)


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
    """The test uses SGD, because Adam is invariant to the scale of gradients."""
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9, clipnorm=0.3)
    weights = fit(make(DistributedOptimizer(optimizer, **options)), *data(job.rank()), 4)
    expected = fit(
        make(keras.optimizers.SGD(0.2, momentum=0.9, clipnorm=0.3)), *joint_data(), 4 * job.size()
    )
    assert_close(weights, expected)


@several
def test_sum_of_gradients(world):
    model = make(DistributedOptimizer(keras.optimizers.SGD(0.1), op=Sum))
    weights = fit(model, *data(job.rank()), 4)
    assert_close(
        weights, fit(make(keras.optimizers.SGD(0.1 * job.size())), *joint_data(), 4 * job.size())
    )


@several
@pytest.mark.parametrize("average", [False, True])
def test_gradients_of_several_steps(world, average):
    """Ranks communicate once for three steps."""
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.1),
        backward_passes_per_step=3,
        average_aggregated_gradients=average,
    )
    before = job.collectives().operation
    weights = fit(make(optimizer), *data(job.rank()), 4)
    if job.size() > 1:
        assert job.collectives().operation - before == 4
    rate = 0.1 if average else 0.3
    reference = make(keras.optimizers.SGD(rate, gradient_accumulation_steps=3))
    assert_close(weights, fit(reference, *joint_data(), 4 * job.size()))


@several
def test_compression(world):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), compression=Compression.fp16)
    weights = fit(make(optimizer), *data(job.rank()), 4)
    expected = fit(make(keras.optimizers.SGD(0.1)), *joint_data(), 4 * job.size())
    assert_close(weights, expected, 2e-3)
    if job.size() > 1:
        with pytest.raises(AssertionError):
            assert_close(weights, expected, 1e-7)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scaled", [True, False])
def test_local_layers(world, scaled):
    model = make("sgd")
    local = model.layers[1]
    optimizer = PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=[local], scale_local_gradients=scaled
    )
    gradients = [tf.ones_like(v.value) * (job.rank() + 1.0) for v in model.trainable_variables]
    before = model.get_weights()
    optimizer.apply(gradients, model.trainable_variables)
    steps = [float(np.mean(a - b)) / 0.1 for a, b in zip(before, model.get_weights())]
    local_step = (job.rank() + 1.0) / (2 if scaled else 1)
    np.testing.assert_allclose(steps, [1.5, 1.5, local_step, local_step], rtol=1e-5)


@pytest.mark.ranks(3)
def test_process_set(world):
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
def test_an_overflow_on_one_rank_skips_the_step_on_all(world):
    inner = keras.optimizers.SGD(0.1)
    optimizer = DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0))
    model = make("sgd")
    before = model.get_weights()
    gradient = np.inf if job.rank() == 1 else 1.0
    gradients = [tf.fill(v.shape, np.float32(gradient)) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    assert_close(model.get_weights(), before, 0)
    # The overflow has halved the scale.
    gradients = [2.0 * tf.ones_like(v.value) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    np.testing.assert_allclose(before[0] - model.get_weights()[0], 0.1, rtol=1e-3)


@several
def test_save_and_load_model(world, tmp_path):
    """The optimizer is saved as the optimizer that it wraps."""
    model = make(DistributedOptimizer(keras.optimizers.Adam(0.01)))
    fit(model, *data(job.rank()), 4)
    file = tmp_path / f"{job.rank()}.keras"
    model.save(file)
    plain = keras.saving.load_model(file)
    assert type(plain.optimizer) is keras.optimizers.Adam
    loaded = load_model(file)
    fit(loaded, *data(job.rank()), 4)
    weights = np.concatenate([weight.reshape(-1) for weight in loaded.get_weights()])
    np.testing.assert_array_equal(weights, job.collectives().broadcast(weights))


def test_invalid_arguments(world):
    sgd = keras.optimizers.SGD
    with pytest.raises(ModelError, match="must be a Keras 3 optimizer, got str"):
        DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="op must be Average or Sum, got Max"):
        DistributedOptimizer(sgd(), op=Max)
    with pytest.raises(ModelError, match="or has gradient_accumulation_steps=2"):
        DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=3)
    by_variable = keras.optimizers.MultiOptimizer(lambda variable: sgd())
    with pytest.raises(ModelError, match="MultiOptimizer has no optimizers yet"):
        DistributedOptimizer(by_variable)
    with pytest.raises(ValueError, match="local_layers must be Keras layers, got int"):
        PartialDistributedOptimizer(sgd(), local_layers=[3])
    with pytest.raises(ModelError, match="legacy_opts must be False"):
        load_model("model.keras", legacy_opts=True)
