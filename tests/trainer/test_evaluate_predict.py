"""The results of ``evaluate`` and ``predict`` on several ranks, compared with one process."""

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.monitor import report
from hvdtrain.world import collectives
from tests.trainer.equivalence import check_close
from tests.trainer.features import X, Y, classifier


def plain_and_distributed(hvdtrain: Any) -> tuple[keras.Model, keras.Model]:
    alone = classifier(metrics=["accuracy"])
    together = classifier(metrics=["accuracy"])
    hvdtrain.distribute(together)
    together.set_weights(alone.get_weights())
    return alone, together


@pytest.mark.essential
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("rows", [1, 2, 7, 53])
def test_evaluate_is_exact_over_uneven_shards(world, rows):
    alone, together = plain_and_distributed(world)
    expected = alone.evaluate(X[:rows], Y[:rows], verbose=0, return_dict=True)
    joint = together.evaluate(X[:rows], Y[:rows], batch_size=4, verbose=0, return_dict=True)
    assert joint["accuracy"] == expected["accuracy"]
    assert joint["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.ranks(2)
def test_evaluate_with_sample_weights_and_datasets(world):
    alone, together = plain_and_distributed(world)
    weight = np.random.default_rng(0).random(len(X)).astype("float32")
    expected = alone.evaluate(X, Y, batch_size=8, sample_weight=weight, verbose=0)
    assert together.evaluate(X, Y, batch_size=4, sample_weight=weight, verbose=0) == (
        pytest.approx(expected, rel=1e-6)
    )
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    assert together.evaluate(dataset, verbose=0) == pytest.approx(
        alone.evaluate(dataset, verbose=0), rel=1e-6
    )


@pytest.mark.ranks(2)
def test_losses_of_single_outputs_are_weighted_by_rows(world):
    x = keras.Input((6,))
    outputs = {"a": keras.layers.Dense(1, name="a")(x), "b": keras.layers.Dense(1, name="b")(x)}
    model = keras.Model(x, outputs)
    model.compile("sgd", {"a": "mse", "b": "mae"})
    y = {"a": X[:, :1], "b": X[:, 1:2]}
    expected = model.evaluate(X, y, batch_size=len(X), verbose=0, return_dict=True)
    world.distribute(model)
    joint = model.evaluate(X, y, batch_size=4, verbose=0, return_dict=True)
    if world.is_chief():
        assert joint == pytest.approx(expected, rel=1e-5)


@pytest.mark.essential
@pytest.mark.ranks(2, 4)
def test_predict_returns_everything_in_order(world):
    alone, together = plain_and_distributed(world)
    expected = alone.predict(X[:53], verbose=0)
    for rows in (1, 5, 53):
        dataset = tf.data.Dataset.from_tensor_slices(X[:rows]).batch(4)
        for source, size in ((X[:rows], 4), (dataset, None)):
            joint = together.predict(source, batch_size=size, verbose=0)
            np.testing.assert_allclose(joint, expected[:rows], atol=1e-6)


@pytest.mark.ranks(2)
def test_all_ranks_end_predict_together(world):

    class Late(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.ends_s = []

        def on_predict_batch_end(self, batch, logs=None):
            time.sleep(0.3 * world.rank())
            self.ends_s.append(time.time())

        def on_predict_end(self, logs=None):
            self.ends_s.append(time.time())

    _, together = plain_and_distributed(world)
    late = Late()
    together.predict(X[:8], batch_size=4, verbose=0, callbacks=[late])
    ranks = collectives().allgather_object(late.ends_s, name="ends")
    assert min(ends[-1] for ends in ranks) >= max(ends[-2] for ends in ranks)


@pytest.mark.ranks(2)
def test_phases_other_than_training_are_reported(world, monkeypatch):
    # The launcher detects hangs in the phase "training" only.
    phases = []
    plain = report.phase

    def phase(name):
        phases.append(name)
        plain(name)

    monkeypatch.setattr(report, "phase", phase)

    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            phases.append("evaluate")
            self.model.evaluate(X, Y, batch_size=4, verbose=0)
            self.model.predict(X, batch_size=4, verbose=0)
            raise InterruptedError

    _, together = plain_and_distributed(world)
    with pytest.raises(InterruptedError):
        together.fit(X, Y, batch_size=4, verbose=0, callbacks=[Evaluate()])
    after = phases[phases.index("evaluate") :]
    assert after[1:] == ["validation", "training", "prediction", "training", "after fit"]


@pytest.mark.ranks(2)
def test_predict_with_several_outputs(world):
    x = keras.Input((6,))
    model = keras.Model(x, {"a": keras.layers.Identity()(x), "b": keras.layers.ReLU()(x)})
    model = keras.Model(x, {**model(x), "c": keras.layers.Dense(1)(x)})
    model.compile("sgd", {"c": "mse"})
    world.distribute(model)
    outputs = model.predict(X, batch_size=4, verbose=0)
    np.testing.assert_array_equal(outputs["a"], X)
    np.testing.assert_array_equal(outputs["b"], np.maximum(X, 0))
    assert outputs["c"].shape == (len(X), 1)


@pytest.mark.ranks(2)
def test_presharded_predictions_are_in_rank_order(world):
    model = classifier()
    world.distribute(model, presharded=True)
    parts = [X[:10], X[10:17]]
    joint = model.predict(parts[world.rank()], batch_size=4, verbose=0)
    np.testing.assert_allclose(joint, model.predict_on_batch(X[:17]), atol=1e-6)


@pytest.mark.ranks(2)
def test_predict_is_traced_once(world):
    _, together = plain_and_distributed(world)
    functions = set()
    for _ in range(2):
        together.predict(X, batch_size=4, verbose=0)
        functions.add(together.predict_function)
    assert len(functions) == 1
    np.testing.assert_allclose(together.predict_step((X,)), together.predict_on_batch(X), atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", [1, 3])
def test_callbacks_see_the_outputs_of_this_rank(world, block):
    class Seen(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            self.outputs = [*getattr(self, "outputs", []), *np.asarray(logs["outputs"])]

    seen = Seen()
    model = classifier(steps_per_execution=block)
    world.distribute(model)
    joint = model.predict(X[:48], batch_size=4, verbose=0, callbacks=[seen])
    np.testing.assert_allclose(joint, model.predict_on_batch(X[:48]), atol=1e-6)
    # Ranks take steps of four rows alternately.
    own = [row for step in range(world.rank(), 12, 2) for row in joint[4 * step : 4 * step + 4]]
    np.testing.assert_array_equal(seen.outputs, own)


class Repeats(keras.layers.Layer):
    """Returns a ragged tensor that repeats each row's first entry as often as its second says."""

    def call(self, inputs):
        counts = tf.cast(inputs[:, 1], tf.int32)
        return tf.RaggedTensor.from_row_lengths(tf.repeat(inputs[:, 0], counts), counts)


class RaggedModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.repeats = Repeats()
        self.built = True

    def call(self, inputs):
        return self.repeats(inputs)


@pytest.mark.ranks(2, 3)
def test_predict_returns_ragged_tensors(world):
    rows = np.array([[number, number % 3] for number in range(11)], "float32")
    model = RaggedModel()
    model.compile("sgd", "mse")
    world.distribute(model)
    outputs = model.predict(rows, batch_size=2, verbose=0)
    assert isinstance(outputs, tf.RaggedTensor)
    assert outputs.to_list() == [[float(number)] * (number % 3) for number in range(11)]


@pytest.mark.ranks(2)
def test_loops_are_limited_by_set_max_steps_per_epoch(world):
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    alone, together = plain_and_distributed(world)
    alone.optimizer.build(alone.trainable_variables)
    keras.config.set_max_steps_per_epoch(2)
    try:
        options = {"epochs": 2, "shuffle": False, "verbose": 0}
        history = together.fit(
            X, Y, 4, callbacks=[count], validation_data=(X, Y), validation_batch_size=4, **options
        ).history
        expected = alone.fit(
            X, Y, 8, validation_data=(X, Y), validation_batch_size=8, **options
        ).history
        predicted = together.predict(X, batch_size=4, verbose=0)
    finally:
        keras.config.set_max_steps_per_epoch(None)
    assert steps == [0, 1, 0, 1]
    assert predicted.shape == (16, 3)
    check_close(history, expected)
