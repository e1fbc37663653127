"""Averaging of gradients with any optimizer, precision and train step."""

import functools

import keras
import numpy as np
import pytest

from hvdtrain import world as state
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from tests.trainer.equivalence import alike, check_close, distance, weights
from tests.trainer.features import ROWS, X, Y, classifier, compare, train_arrays
from tests.trainer.own_steps import OwnStep
from tests.trainer.patterns.pattern import built


@pytest.mark.essential
@pytest.mark.ranks(2)
def test_gradients_of_different_batches_are_averaged(world):
    # One step of SGD from zero: the weight is minus the mean of the gradients.
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[-1].kernel.assign([[0.0]])
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: p)
    world.distribute(model)
    x = np.array([[1.0], [3.0], [5.0], [7.0]], "float32")
    model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    assert model.layers[-1].kernel.numpy() == pytest.approx(-4.0)


@pytest.mark.essential
@pytest.mark.ranks(2)
def test_ranks_differ_without_averaging(world, monkeypatch):
    monkeypatch.setattr(
        GradientReducer, "average", lambda self, gradients, *_, **__: list(gradients)
    )
    model = classifier()
    world.distribute(model)
    train_arrays(model, 4)
    assert not alike(model)


@pytest.mark.ranks(2)
def test_clipping_sees_the_average(world):
    optimizer = functools.partial(keras.optimizers.SGD, 0.1, global_clipnorm=0.01)
    compare(world, lambda: classifier(optimizer=optimizer()), train_arrays)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_kinds_of_optimizers_in_fit(world, name):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"this Keras has no {name}")
    compare(
        world,
        lambda: classifier(optimizer=getattr(keras.optimizers, name)(0.01)),
        train_arrays,
    )


@pytest.mark.ranks(2)
def test_every_kind_of_optimizer_applies_the_average(world):
    numbers = np.random.default_rng(5)
    gradients = numbers.normal(size=(3, world.size(), 4, 2)).astype("float32")
    kinds = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop")
    for name in kinds:
        results = []
        for distributes in (False, True):
            optimizer = getattr(keras.optimizers, name)(0.01)
            kernel = keras.Variable(np.ones((4, 2), "float32"))
            optimizer.build([kernel])
            if distributes:
                world.DistributedOptimizer(optimizer)
            for step in gradients:
                optimizer.apply([step[world.rank()] if distributes else step.mean(axis=0)])
            results.append([np.asarray(kernel.value), *map(np.asarray, optimizer.variables)])
        check_close(results[1], results[0], name)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.14")
@pytest.mark.ranks(2)
def test_a_multi_optimizer_must_be_built_before_it_is_distributed(world):
    momentum = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: momentum)
    with pytest.raises(ModelError, match=r"no optimizers yet.*optimizer\.build"):
        world.DistributedOptimizer(optimizer)
    weight = keras.Variable(np.zeros(3))
    optimizer.build([weight])
    world.DistributedOptimizer(optimizer)
    optimizer.apply([np.full(3, float(world.rank()), "float32")], [weight])
    np.testing.assert_array_equal(weight.numpy(), np.full(3, -0.5))


@pytest.mark.ranks(2)
def test_accumulation_with_a_custom_train_step(world):
    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        return built(OwnStep(), optimizer=optimizer)

    compare(world, make, train_arrays)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 3}])
def test_eager_steps_and_several_steps_per_execution(world, options):
    compare(world, lambda: classifier(**options), train_arrays)


@pytest.mark.ranks(2)
def test_sparse_gradients_are_sent_as_unique_rows_or_dense(world, monkeypatch):
    sizes = []
    gather = type(state.collectives()).allgather

    def spy(self, array, *, name=""):
        if name.startswith("rows of"):
            sizes.append(array.shape)
        return gather(self, array, name=name)

    monkeypatch.setattr(type(state.collectives()), "allgather", spy)
    results = []
    for options in ({}, {"sparse_as_dense": True}):
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(1000, 3)])
        model.add(keras.layers.Flatten())
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
        world.distribute(model, **options)
        # Each rank has seven different indices.
        tokens = np.arange(16).reshape(8, 2)
        tokens[tokens == 1] = 0
        tokens[tokens == 15] = 14
        model.fit(tokens, np.ones(8), batch_size=4, shuffle=False, verbose=0)
        results.append(weights(model))
        # These rows and one row with the rank's weight. Each has 3 values and an index.
        assert sizes == [(7 + 1, 3 * 4 + 4)]
    assert distance(model, results[0]) < 1e-6


@pytest.mark.ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(world):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_float16")])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=128.0)
    model.compile(optimizer, "mse")
    world.distribute(model)
    before = model.layers[0].kernel.numpy().copy()
    x = np.ones((8, 4), "float32")
    x[7] = 3e4  # only in rank 1's part of the last joint batch
    y = np.zeros((8, 2), "float32")
    model.fit(x[4:], y[4:], batch_size=2, shuffle=False, verbose=0)
    assert alike(model)
    assert (model.layers[0].kernel.numpy() == before).all()
    assert float(optimizer.dynamic_scale.numpy()) == 64.0
    model.fit(x[:4], y[:4], batch_size=2, shuffle=False, verbose=0)
    assert alike(model)
    assert (model.layers[0].kernel.numpy() != before).any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_keeps_ranks_equal(world, policy):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(8, "relu", dtype=policy)]
    model = keras.Sequential([*layers, keras.layers.Dense(3, dtype="float32")])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    world.distribute(model)
    before = weights(model)
    train_arrays(model, 6)
    assert alike(model)
    assert distance(model, before) > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss_scaling", [False, True])
def test_accumulation_reduces_once_per_update(world, monkeypatch, loss_scaling):
    calls = []
    engine = state.collectives()
    allreduce = engine.grouped_allreduce

    def spy(arrays, *arguments, **options):
        if options.get("name") == "gradients":
            calls.append(len(arrays))
        return allreduce(arrays, *arguments, **options)

    monkeypatch.setattr(engine, "grouped_allreduce", spy)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    if loss_scaling:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = classifier(optimizer=optimizer)
    world.distribute(model)
    model.fit(X[:48], Y[:48], batch_size=3, verbose=0)
    assert len(calls) == 2  # 8 steps, 4 per update


@pytest.mark.ranks(2)
def test_the_saved_model_is_a_plain_keras_model(world, tmp_path):
    model = classifier(optimizer=keras.optimizers.Adam(0.01))
    world.distribute(model)
    train_arrays(model, 6)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert loaded.optimizer.iterations.numpy() == model.optimizer.iterations.numpy()
    np.testing.assert_array_equal(loaded.predict(X, verbose=0).shape, (ROWS, 3))
    assert b"hvdtrain" not in path.read_bytes()
