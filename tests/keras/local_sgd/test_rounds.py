"""When ranks average their weights, and what comes of it."""

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
from tests.keras.equivalence import from_chief
from tests.keras.features import JOINT_BATCH, OwnStep, X, Y, classifier

# Four joint batches and one of five rows.
ROWS = JOINT_BATCH * 4 + 5


def trained(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(v.numpy()) for v in model.trainable_variables]


def alike(model: keras.Model, variables: Any = None) -> bool:
    """Whether all ranks have the same weights, to the bit; collective."""
    values = trained(model) if variables is None else [v.numpy() for v in variables]
    mine = b"".join(np.asarray(value).tobytes() for value in values).hex()
    return len(set(job.collectives().allgather_object(mine, name="weights"))) == 1


class Looks(keras.callbacks.Callback):
    """Notes after which steps ranks are alike, and at which other points."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[bool] = []
        self.others: list[bool] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(alike(self.model))

    def on_test_begin(self, logs: Any = None) -> None:
        self.others.append(alike(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.others.append(alike(self.model, self.model.variables))


def normalized(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(5, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), loss, metrics=["accuracy"], **options)
    return model


@pytest.mark.ranks(2)
def test_a_stop_on_one_rank_within_a_round_ends_all_at_that_batch(local_sgd):
    world = local_sgd(4)
    model = classifier()
    world.distribute(model)

    def stop(batch: int, logs: Any) -> None:
        if world.rank() == 1 and batch == 1:
            model.stop_training = True

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    model.fit(X[:ROWS], Y[:ROWS], batch_size=JOINT_BATCH // 2, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 2
    assert alike(model)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("outer", [{}, {"outer_learning_rate": 0.7, "outer_momentum": 0.9}])
def test_ranks_are_alike_after_each_round_and_at_the_end_of_epochs(local_sgd, outer):
    """Also the averages that optimizers keep, which the model ends with, and moving statistics."""
    world = local_sgd(3, **outer)
    model, looks = normalized(), Looks()
    world.distribute(model)
    data = {"batch_size": JOINT_BATCH // world.size(), "epochs": 2, "validation_data": (X, Y)}
    model.fit(X, Y, verbose=0, callbacks=[looks], **data)
    # Five steps an epoch: the third ends a round, and a new one begins with each epoch.
    assert looks.steps == [False, False, True, False, False] * 2
    assert looks.others == [True] * 4
    assert alike(model, model.variables)
    assert not alike(model, model.optimizer.variables)


@pytest.mark.ranks(2)
def test_several_steps_in_one_go(local_sgd):
    model, looks = normalized(steps_per_execution=2), Looks()
    local_sgd(4).distribute(model)
    model.fit(X[:48], Y[:48], batch_size=2, verbose=0, callbacks=[looks])
    assert looks.steps == [False, True] * 3
    assert looks.others == [True]


@pytest.mark.ranks(2)
def test_within_a_round_ranks_exchange_nothing(local_sgd):
    model = normalized()
    local_sgd(3).distribute(model)
    found: list[FinishedOperation] = []
    seen: list[list[str]] = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            found.clear()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([operation.title for operation in found])

    job.collectives().observers.append(found.append)
    try:
        model.fit(X[:48], Y[:48], batch_size=6, epochs=2, verbose=0, callbacks=[Notes()])
    finally:
        job.collectives().observers.remove(found.append)
    # After the first step of an epoch all see that they have the same data, and with the first
    # average of all that they have the same weights.
    assert seen[-3:] == [[], ["allreduce(steps of all ranks)", "allreduce(weights)"], []]


def pipeline() -> dict[str, Any]:
    return {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)}


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-ROWS // 6)

    def __getitem__(self, index: int) -> Any:
        return X[index * 6 : index * 6 + 6], Y[index * 6 : index * 6 + 6]


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
    "arrays": (classifier, lambda: ARRAYS),
    "sample weights": (classifier, lambda: {**ARRAYS, "sample_weight": np.arange(ROWS) / ROWS}),
    "jit": (lambda: classifier(jit_compile=True), lambda: ARRAYS),
    "learning rates": (
        classifier,
        lambda: {
            **ARRAYS,
            "callbacks": [keras.callbacks.LearningRateScheduler(lambda e: 0.2 - e / 9)],
        },
    ),
    "tf.data": (classifier, pipeline),
    "PyDataset": (classifier, lambda: {"x": Batches()}),
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
        pytest.param(case, marks=() if case in ("arrays", "accumulation") else pytest.mark.more)
        for case in SYNCHRONOUS
    ],
)
def test_rounds_of_one_step_are_synchronous_training(world, local_sgd, case):
    make, arguments = SYNCHRONOUS[case]
    found, losses = [], []
    for turn in (lambda: world, lambda: local_sgd(1)):
        model = make()
        turn().distribute(model)
        history = model.fit(**arguments(), epochs=2, shuffle=False, verbose=0).history
        losses.append(history.get("loss"))
        found.append(trained(model))
        assert alike(model)
    for synchronous, local in zip(*found):
        np.testing.assert_allclose(local, synchronous, rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.essential
@pytest.mark.ranks(2)
def test_rounds_are_what_the_paper_says(local_sgd):
    """DiLoCo of two ranks, Adam within and Nesterov momentum between, done again by hand."""
    world = local_sgd(2, outer_learning_rate=0.7, outer_momentum=0.9)
    # Joint batches of 12 rows, of which each rank takes its six; three steps an epoch.
    x, y = X[:36], Y[:36]

    def make() -> keras.Model:
        return classifier(optimizer=keras.optimizers.Adam(0.02))

    together = make()
    world.distribute(together)
    together.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    ranks = [make(), make()]
    anchor = [v.astype("float64") for v in trained(ranks[0])]
    velocity = [np.zeros_like(v) for v in anchor]
    for _ in range(2):
        for steps in ((0, 1), (2,)):
            for rank, model in enumerate(ranks):
                for variable, value in zip(model.trainable_variables, anchor):
                    variable.assign(value)
                for step in steps:
                    rows = slice(12 * step + 6 * rank, 12 * step + 6 * rank + 6)
                    model.train_on_batch(x[rows], y[rows])
            averages = [np.mean(both, axis=0) for both in zip(*map(trained, ranks))]
            gradients = [a - b for a, b in zip(anchor, averages)]
            velocity = [0.9 * v + g for v, g in zip(velocity, gradients)]
            steps_ = [g + 0.9 * v for v, g in zip(velocity, gradients)]
            anchor = [a - 0.7 * s for a, s in zip(anchor, steps_)]
    for mine, by_hand in zip(trained(together), from_chief(anchor)):
        np.testing.assert_allclose(mine, by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
def test_a_rank_counts_as_much_as_its_samples(local_sgd):
    """And a step without any moves nothing, whatever momentum and decay say."""
    world = local_sgd(100)
    model = classifier(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1))
    world.distribute(model)
    before: list[Any] = [trained(model)]
    joined: list[Any] = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            before.append(trained(self.model))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            joined.extend(trained(self.model))

    # In the last step the second rank has none.
    model.fit(X[:49], Y[:49], batch_size=6, shuffle=False, verbose=0, callbacks=[Notes()])
    moved = [any((a != b).any() for a, b in zip(*pair)) for pair in pairwise(before)]
    assert moved == [True] * 4 + [world.rank() == 0]
    ways = job.collectives()
    for mine, joint in zip(before[-1], joined):
        first, second = ways.allgather(mine[np.newaxis], name="of both")
        np.testing.assert_allclose(joint, (25 * first + 24 * second) / 49, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(2)
def test_the_next_round_begins_where_weights_are_set(local_sgd):
    """The outer optimizer knows nothing of what a callback does between two rounds."""
    world = local_sgd(3, outer_learning_rate=0.5)
    model = classifier(optimizer=keras.optimizers.SGD(0.0))
    world.distribute(model)

    class Sets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights([np.full(v.shape, epoch + 2.0) for v in self.model.weights])

    model.fit(X, Y, batch_size=6, epochs=2, verbose=0, callbacks=[Sets()])
    model.fit(X, Y, batch_size=6, verbose=0)
    assert all((value == 3.0).all() for value in trained(model))


@pytest.mark.ranks(2)
def test_weights_that_are_not_finite_are_named(local_sgd):
    world = local_sgd(2)
    model = classifier()
    world.distribute(model)
    x = X.copy()
    x[9] = np.nan  # in the second rank's part of the first joint batch
    with pytest.raises(NonFiniteError, match=r"A weight is not .*dense\w*/kernel \(NaN\).* rank 1"):
        model.fit(x, Y, batch_size=6, shuffle=False, verbose=0)


@pytest.mark.ranks(2)
def test_gradients_of_a_loop_of_ones_own_are_refused(local_sgd):
    world = local_sgd(2)
    for make in (
        lambda: world.DistributedGradientTape(tf.GradientTape()),
        lambda: world.DistributedOptimizer(keras.optimizers.SGD()),
    ):
        with pytest.raises(
            ModelError, match=r"averages gradients .* in mode local-sgd .*model\.fit"
        ):
            make()
    world.broadcast_variables([tf.Variable(1.0)])


@pytest.mark.ranks(2)
def test_scales_of_float8_are_no_weights(local_sgd):
    layers = [keras.Input((16,)), keras.layers.Dense(16, dtype="float8_from_float32")]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"can.t be averaged.* another --mode than local-sgd"):
        local_sgd(2).distribute(model)


@pytest.mark.ranks(1, 2)
def test_an_outer_optimizer_acts_on_one_rank_as_well(local_sgd):
    world = local_sgd(2, outer_learning_rate=0.5)
    model = classifier(optimizer=keras.optimizers.SGD(0.1))
    world.distribute(model)
    before = trained(model)
    model.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    plain = classifier(optimizer=keras.optimizers.SGD(0.1))
    plain.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    for mine, first, theirs in zip(trained(model), before, trained(plain)):
        np.testing.assert_allclose(mine, (first + theirs) / 2, rtol=1e-5, atol=1e-6)
