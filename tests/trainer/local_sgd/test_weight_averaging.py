from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.collectives.engine_core import FinishedOperation
from hvdtrain.errors import ModelError, NonFiniteError
from hvdtrain.trainer.local_sgd.weight_averaging import OuterOptimizer
from tests.trainer.equivalence import from_chief
from tests.trainer.features import JOINT_BATCH, X, Y, classifier
from tests.trainer.graphs import clusters
from tests.trainer.own_steps import OwnStep

# Four joint batches and one of five rows.
ROWS = JOINT_BATCH * 4 + 5


def weights_of(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(v.numpy()) for v in model.trainable_variables]


def ranks_agree(model: keras.Model, variables: Any = None) -> bool:
    """Return whether all ranks have bitwise equal weights. All ranks must call this."""
    values = weights_of(model) if variables is None else [v.numpy() for v in variables]
    data = b"".join(np.asarray(value).tobytes() for value in values).hex()
    return len(set(job.collectives().allgather_object(data, name="weights"))) == 1


class Observer(keras.callbacks.Callback):
    """Records whether ranks agree after each step, in validations and at the end of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[bool] = []
        self.others: list[bool] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(ranks_agree(self.model))

    def on_test_begin(self, logs: Any = None) -> None:
        self.others.append(ranks_agree(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.others.append(ranks_agree(self.model, self.model.variables))


def normalized(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(5, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), loss, metrics=["accuracy"], **options)
    return model


@pytest.mark.ranks(2)
def test_a_stop_on_one_rank_stops_all_after_that_batch(local_sgd):
    world = local_sgd(4)
    model = classifier()
    world.distribute(model)

    def stop(batch: int, logs: Any) -> None:
        if world.rank() == 1 and batch == 1:
            model.stop_training = True

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    model.fit(X[:ROWS], Y[:ROWS], batch_size=JOINT_BATCH // 2, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 2
    assert ranks_agree(model)


@pytest.mark.ranks(2)
def test_ranks_agree_after_each_round_and_at_the_end_of_epochs(local_sgd):
    """All ranks have the same weights, moving averages of weights, and moving statistics."""
    world = local_sgd(3, outer_learning_rate=0.7, outer_momentum=0.9)
    model, observer = normalized(), Observer()
    world.distribute(model)
    data = {"batch_size": JOINT_BATCH // world.size(), "epochs": 2, "validation_data": (X, Y)}
    model.fit(X, Y, verbose=0, callbacks=[observer], **data)
    # An epoch has five steps, of which the third ends a round.
    assert observer.steps == [False, False, True, False, False] * 2
    assert observer.others == [True] * 4
    assert ranks_agree(model, model.variables)
    assert not ranks_agree(model, model.optimizer.variables)


@pytest.mark.ranks(2)
def test_several_steps_per_execution(local_sgd):
    model, observer = normalized(steps_per_execution=2), Observer()
    local_sgd(4).distribute(model)
    model.fit(X[:48], Y[:48], batch_size=2, verbose=0, callbacks=[observer])
    assert observer.steps == [False, True] * 3
    assert observer.others == [True]


@pytest.mark.ranks(2)
def test_ranks_do_not_communicate_within_a_round(local_sgd):
    model = normalized()
    local_sgd(3).distribute(model)
    finished: list[FinishedOperation] = []
    by_batch: list[list[str]] = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            finished.clear()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            by_batch.append([operation.title for operation in finished])

    job.collectives().observers.append(finished.append)
    try:
        model.fit(X[:48], Y[:48], batch_size=6, epochs=2, verbose=0, callbacks=[Notes()])
    finally:
        job.collectives().observers.remove(finished.append)
    # The first epoch also has checks of data and variables.
    assert by_batch[-3:] == [[], ["allreduce(steps of all ranks)", "allreduce(weights)"], []]


def own_step() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = OwnStep()
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(True))
    return model


def summed() -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return classifier(optimizer=keras.optimizers.SGD(0.01), loss=loss)


ARRAYS = {"x": X, "y": Y, "batch_size": 6}
SYNCHRONOUS: dict[str, tuple[Any, Any]] = {
    "sample weights": (classifier, lambda: {**ARRAYS, "sample_weight": np.arange(ROWS) / ROWS}),
    "jit": (lambda: classifier(jit_compile=True), lambda: ARRAYS),
    "learning rates": (
        classifier,
        lambda: {
            **ARRAYS,
            "callbacks": [keras.callbacks.LearningRateScheduler(lambda e: 0.2 - e / 9)],
        },
    ),
    "own train_step": (own_step, lambda: ARRAYS),
    "accumulation": (
        lambda: classifier(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
        lambda: {**ARRAYS, "x": X[:48], "y": Y[:48]},
    ),
    "loss scaling": (
        lambda: classifier(
            optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        ),
        lambda: ARRAYS,
    ),
    "sum": (summed, lambda: ARRAYS),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if case in ("sample weights", "accumulation") else pytest.mark.more
        )
        for case in SYNCHRONOUS
    ],
)
def test_rounds_of_one_step_equal_synchronous_training(world, local_sgd, case):
    make, arguments = SYNCHRONOUS[case]
    results, losses = [], []
    for mode in (lambda: world, lambda: local_sgd(1)):
        model = make()
        mode().distribute(model)
        history = model.fit(**arguments(), epochs=2, shuffle=False, verbose=0).history
        losses.append(history.get("loss"))
        results.append(weights_of(model))
        assert ranks_agree(model)
        if case == "jit":
            assert clusters(model) == 2
    for synchronous, local in zip(*results):
        np.testing.assert_allclose(local, synchronous, rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.essential
@pytest.mark.ranks(2)
def test_rounds_with_an_outer_optimizer_implement_diloco(local_sgd):
    """The test repeats training by hand, with Adam in rounds and Nesterov momentum after them."""
    world = local_sgd(2, outer_learning_rate=0.7, outer_momentum=0.9)
    # Each rank takes six rows of a joint batch; an epoch has three steps.
    x, y = X[:36], Y[:36]

    def make() -> keras.Model:
        return classifier(optimizer=keras.optimizers.Adam(0.02))

    together = make()
    world.distribute(together)
    together.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    ranks = [make(), make()]
    anchor = [v.astype("float64") for v in weights_of(ranks[0])]
    velocity = [np.zeros_like(v) for v in anchor]
    for _ in range(2):
        for steps in ((0, 1), (2,)):
            for rank, model in enumerate(ranks):
                for variable, value in zip(model.trainable_variables, anchor):
                    variable.assign(value)
                for step in steps:
                    rows = slice(12 * step + 6 * rank, 12 * step + 6 * rank + 6)
                    model.train_on_batch(x[rows], y[rows])
            averages = [np.mean(both, axis=0) for both in zip(*map(weights_of, ranks))]
            gradients = [a - b for a, b in zip(anchor, averages)]
            velocity = [0.9 * v + g for v, g in zip(velocity, gradients)]
            steps_ = [g + 0.9 * v for v, g in zip(velocity, gradients)]
            anchor = [a - 0.7 * s for a, s in zip(anchor, steps_)]
    for got, expected in zip(weights_of(together), from_chief(anchor)):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
def test_ranks_are_weighted_by_their_samples(local_sgd):
    """A step without samples must not change weights, despite momentum and weight decay."""
    world = local_sgd(100)
    model = classifier(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1))
    world.distribute(model)
    before: list[Any] = [weights_of(model)]
    averaged: list[Any] = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            before.append(weights_of(self.model))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            averaged.extend(weights_of(self.model))

    # The second rank has no samples in the last step.
    model.fit(X[:49], Y[:49], batch_size=6, shuffle=False, verbose=0, callbacks=[Notes()])
    changed = [any((a != b).any() for a, b in zip(*pair)) for pair in pairwise(before)]
    assert changed == [True] * 4 + [world.rank() == 0]
    allgather = job.collectives().allgather
    for own, average in zip(before[-1], averaged):
        first, second = allgather(own[np.newaxis], name="of both")
        np.testing.assert_allclose(average, (25 * first + 24 * second) / 49, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(2)
def test_callbacks_may_set_weights_between_rounds(local_sgd):
    """The outer optimizer starts from the weights that callbacks set."""
    world = local_sgd(3, outer_learning_rate=0.5)
    model = classifier(optimizer=keras.optimizers.SGD(0.0))
    world.distribute(model)

    class Sets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights([np.full(v.shape, epoch + 2.0) for v in self.model.weights])

    model.fit(X, Y, batch_size=6, epochs=2, verbose=0, callbacks=[Sets()])
    model.fit(X, Y, batch_size=6, verbose=0)
    assert all((value == 3.0).all() for value in weights_of(model))


@pytest.mark.ranks(2)
def test_the_error_names_weights_that_are_not_finite(local_sgd):
    world = local_sgd(2)
    model = classifier()
    world.distribute(model)
    x = X.copy()
    x[9] = np.nan  # in the second rank's part of the first joint batch
    with pytest.raises(NonFiniteError, match=r"A weight is not .*dense\w*/kernel \(NaN\).* rank 1"):
        model.fit(x, Y, batch_size=6, shuffle=False, verbose=0)


@pytest.mark.ranks(2)
def test_custom_training_loops_are_refused(local_sgd):
    world = local_sgd(2)
    for make in (
        lambda: world.DistributedGradientTape(tf.GradientTape()),
        lambda: world.DistributedOptimizer(keras.optimizers.SGD()),
    ):
        with pytest.raises(ModelError, match=r"does not support mode local-sgd.*model\.fit"):
            make()
    world.broadcast_variables([tf.Variable(1.0)])


@pytest.mark.ranks(2)
def test_float8_scales_can_not_be_averaged(local_sgd):
    layers = [keras.Input((16,)), keras.layers.Dense(16, dtype="float8_from_float32")]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"can.t be averaged.* a different --mode from local-sgd"):
        local_sgd(2).distribute(model)


@pytest.mark.ranks(1)
def test_the_outer_optimizer_is_also_applied_on_a_single_rank(local_sgd):
    world = local_sgd(2, outer_learning_rate=0.5)
    model = classifier(optimizer=keras.optimizers.SGD(0.1))
    world.distribute(model)
    before = weights_of(model)
    model.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    plain = classifier(optimizer=keras.optimizers.SGD(0.1))
    plain.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    for got, first, after in zip(weights_of(model), before, weights_of(plain)):
        np.testing.assert_allclose(got, (first + after) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rate", "momentum"), [(0.75, 0.875), (0.5, 0.0), (1.0, 0.5)])
def test_the_outer_optimizer_is_keras_sgd_with_nesterov_momentum(rate, momentum):
    rng = np.random.default_rng(1)
    outer = OuterOptimizer(learning_rate=rate, momentum=momentum)
    sgd = keras.optimizers.SGD(rate, momentum=momentum, nesterov=bool(momentum))
    variable = keras.Variable(rng.normal(size=(3, 4)), dtype="float64")
    weights, velocity = variable.numpy(), np.zeros((3, 4))
    for _ in range(5):
        average = weights + rng.normal(size=(3, 4))
        sgd.apply([weights - average], [variable])
        weights, velocity = outer.step(weights, average, velocity)
        np.testing.assert_allclose(weights, variable.numpy(), rtol=1e-12)


def test_by_default_the_outer_optimizer_returns_the_average():
    assert OuterOptimizer().is_plain_average
    assert not OuterOptimizer(learning_rate=0.7).is_plain_average
    assert not OuterOptimizer(momentum=0.9).is_plain_average
    anchor, average = np.array([1.0, 2.0]), np.array([3.0, -1.0])
    np.testing.assert_array_equal(OuterOptimizer().step(anchor, average, None)[0], average)
