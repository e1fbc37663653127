"""Steps that XLA compiles, except for the collectives."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.equivalence import check_close
from tests.trainer.features import X, Y, classifier, compare, train_arrays
from tests.trainer.graphs import clusters, is_cluster, operations, traced
from tests.trainer.own_steps import OwnStep
from tests.trainer.patterns.pattern import built

# Operations that compute nothing.
FREE = {"Const", "Identity", "NoOp", "Placeholder"}


def multi_optimizer() -> Any:
    adam, sgd = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.5)
    return keras.optimizers.MultiOptimizer(lambda v: adam if "kernel" in v.path else sgd)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "clipping, decay and moving averages": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5),
        weight_decay=0.1,
        global_clipnorm=0.1,
        use_ema=True,
        ema_overwrite_frequency=3,
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=5),
    "scaled accumulation": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1),
        initial_scale=64.0,
        dynamic_growth_steps=2,
    ),
    "fixed scale": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0, clipvalue=0.01),
    "several optimizers": multi_optimizer,
}


def model_for(optimizer: Any, *, sparse: bool = True) -> keras.Model:
    """Return a model with a constraint, and with sparse gradients."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    x = keras.Input((6,))
    hidden = layers.Dense(5, "relu", kernel_constraint=keras.constraints.MaxNorm(0.7))(x)
    if sparse:
        rows = layers.Embedding(9, 3)(keras.ops.cast(keras.ops.abs(x) * 3.0, "int32"))
        hidden = layers.Concatenate()([hidden, layers.GlobalAveragePooling1D()(rows)])
    model = keras.Model(x, layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=True)
    optimizer.build(model.trainable_variables)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_updates_equal_one_process(world, name, caplog):
    if "several" in name and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("Keras 3.14")

    def make() -> keras.Model:
        optimizer = OPTIMIZERS[name]()
        # Keras can't scale sparse gradients by a fixed factor.
        return model_for(optimizer, sparse=name != "fixed scale")

    together = compare(world, make, train_arrays)
    assert together.jit_compile
    assert "jit_compile is ignored" not in caplog.text


@pytest.mark.ranks(2)
def test_the_number_of_operations_does_not_depend_on_the_number_of_variables(world):
    def run_outside(name: str, blocks: int) -> tuple[int, int]:
        layers = [
            layer
            for _ in range(blocks)
            for layer in (keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization())
        ]
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[name](), loss, metrics=["accuracy"], jit_compile=True)
        world.distribute(model)
        found = [operation for operation in traced(model) if operation.type not in FREE]
        return len(found), sum(map(is_cluster, found))

    for name, limit, expected in (
        ("clipping, decay and moving averages", 60, 2),
        ("accumulation", 70, 3),
        ("scaled accumulation", 90, 5),
    ):
        few, inside = run_outside(name, 1)
        many, _ = run_outside(name, 3)
        assert inside == expected, name
        # The 3 blocks have 12 more variables. Without rows, the gradient of each is zeros.
        assert few <= limit, (name, few)
        assert many - few <= 12, (name, few, many)


@pytest.mark.ranks(2)
def test_jit_compile_is_as_in_one_process(world, monkeypatch):
    def distributed(model: keras.Model) -> int:
        world.distribute(model)
        return clusters(model)

    model = classifier(jit_compile=True)
    assert [distributed(model), distributed(model)] == [2, 2]
    assert model.jit_compile
    loss = model.loss
    model.compile("sgd", loss, jit_compile=False)
    assert [distributed(model), distributed(model)] == [0, 0]
    model.compile("sgd", loss)
    assert [distributed(model), model.jit_compile] == [0, False]  # there are only CPUs

    plain = tf.config.list_physical_devices
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *kind: [*plain(*kind), device])
    model.compile("sgd", loss)
    unsupported = classifier()
    unsupported.layers[0].supports_jit = False
    unsupported.compile("sgd", loss)
    monkeypatch.undo()
    assert distributed(model) == 2
    assert distributed(unsupported) == 0
    model.run_eagerly = True
    model.fit(X[:8], Y[:8], batch_size=4, verbose=0)  # eagerly, as in one process


@pytest.mark.ranks(2)
def test_evaluate_and_predict_are_compiled(world):
    model = classifier(jit_compile=True)
    world.distribute(model)
    found = model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)
    model.jit_compile = False
    model.make_test_function(force=True)
    model.make_predict_function(force=True)
    expected = model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)
    check_close([*found], [*expected])

    def count(step: Any, *batch: Any) -> int:
        graph = tf.function(step, autograph=False).get_concrete_function(*batch).graph
        return sum(map(is_cluster, operations(graph)))

    batches = (model.test_step, (X[:4], Y[:4])), (model.predict_step, (X[:4],))
    assert [count(*each) for each in batches] == [0, 0]
    model.jit_compile = True
    assert [count(*each) for each in batches] == [1, 1]


class Recording(keras.optimizers.SGD):
    """An optimizer that calls Python in each update of a dense gradient."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            copied = tf.numpy_function(np.copy, [gradient], tf.float32)
            gradient = tf.ensure_shape(copied, variable.shape)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.ranks(2)
def test_an_optimizer_that_xla_does_not_support_runs_without_it(world, caplog):
    model = compare(world, lambda: model_for(Recording(0.1)), train_arrays)
    message = "ignored for the optimizer's update, because XLA does not support PyFunc"
    assert message in caplog.text
    assert clusters(model) == 1


@pytest.mark.ranks(2)
def test_the_update_of_a_custom_train_step_is_compiled(world, caplog):
    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        return built(OwnStep(), optimizer=optimizer, jit_compile=True)

    model = compare(world, make, train_arrays)
    assert ("applies only to its optimizers' updates" in caplog.text) == world.is_chief()
    # The weights of the loss, the sums of accumulated gradients, and the update.
    assert clusters(model) == 3


@pytest.mark.ranks(2)
def test_compiled_updates_add_no_variables(world, tmp_path):
    names = []
    for distributes in (False, True):
        keras.utils.clear_session()
        model = model_for(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)))
        model.run_eagerly = not distributes  # faster than compiling
        if distributes:
            world.distribute(model)
        model.fit(X[:24], Y[:24], batch_size=6, verbose=0)
        names.append([v.name for v in [*model.variables, *model.optimizer.variables]])
    assert names[0] == names[1]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
    assert loaded.get_compile_config()["jit_compile"] is True
