"""Programs as Keras' guides write them: on two ranks each gives what it gives in one process."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.errors import ModelError
from tests.keras.features import JOINT_BATCH, TOLERANCE, OwnStep, X, Y
from tests.keras.patterns import PATTERNS
from tests.keras.patterns.pattern import (
    LOSS,
    NOISE,
    SEQUENCES,
    built,
    fit,
    outcome,
    stack,
    state,
)
from tests.keras.patterns.steps import make_gan
from tests.keras.saving.runs import Stop, StopAfter


def _marked(name):
    return pytest.param(name, marks=() if PATTERNS[name].often else pytest.mark.more)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [*map(_marked, PATTERNS)])
def test_a_pattern_of_keras_guides(world, name):
    pattern = PATTERNS[name]
    if pattern.since > tuple(map(int, keras.version().split(".")[:2])):
        pytest.skip(f"Keras {keras.version()} has nothing of the kind")
    keras.utils.set_random_seed(3)
    expected = None
    if world.is_chief():
        alone = pattern.make()
        alone.run_eagerly = pattern.eager
        told_alone = outcome(pattern.train(alone, JOINT_BATCH))
        expected = told_alone, state(alone)
    told_alone, state_alone = job.collectives().broadcast_object(
        expected, name="alone", codec="pickle"
    )
    # Or names would tell that the chief has built one before.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    together = pattern.make()
    world.distribute(together)
    told = outcome(pattern.train(together, JOINT_BATCH // world.size()))
    for mine, theirs in zip(state(together), state_alone, strict=True):
        scale = max(np.max(np.abs(theirs), initial=0.0), 1e-30)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE * scale)
    assert told.keys() == told_alone.keys()
    for entry, values in told_alone.items():
        np.testing.assert_allclose(told[entry], values, rtol=1e-4, atol=1e-6, err_msg=entry)
    digests = [array.tobytes().hex() for array in state(together)]
    assert job.collectives().allgather_object(digests, name="test") == [digests] * world.size()


@pytest.mark.ranks(2)
@pytest.mark.more
def test_recurrent_layers_that_keep_their_states_between_batches(world):
    """Sample i of a batch goes on where that of the batch before ended: each rank has its own."""

    class Forget(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.layers[0].reset_state()

    def train(size, distribute):
        keras.utils.set_random_seed(3)
        start = keras.Input(batch_shape=(size, 5, 3))
        model = stack(keras.layers.GRU(3, stateful=True), keras.layers.Dense(3), start=start)
        distribute(model)
        history = fit(SEQUENCES[:48], Y[:48], epochs=4, callbacks=[Forget()])(model, size)
        return [state(model), history["loss"]]

    alone = train(JOINT_BATCH, lambda model: None)
    together = train(JOINT_BATCH // 2, world.distribute)
    for mine, theirs in zip(keras.tree.flatten(together), keras.tree.flatten(alone), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "source",
    [
        "generator of the model",
        *(pytest.param(name, marks=pytest.mark.more) for name in ("keras.random", "tf.random")),
    ],
)
def test_ranks_draw_their_own_numbers_in_a_step(world, source):
    draws = {
        "generator of the model": lambda shape, seeds: keras.random.normal(shape, seed=seeds),
        "keras.random": lambda shape, seeds: keras.random.normal(shape),
        "tf.random": lambda shape, seeds: tf.random.normal(shape),
    }
    seen = []

    def draw(shape, seeds):
        noise = draws[source](shape, seeds)
        tf.numpy_function(lambda array: seen.append(array[0].tolist()), [noise], [])
        return noise

    _begin_anew()
    gan = make_gan(draw=draw)
    world.distribute(gan)
    fit(X, NOISE, epochs=1)(gan, JOINT_BATCH // 2)
    drawn = job.collectives().allgather_object(seen, name="test")
    assert len(drawn[0]) == len(drawn[1]) >= 5
    assert not any(mine == theirs for mine in drawn[0] for theirs in drawn[1])
    _begin_anew()
    seen.clear()
    fit(X, NOISE, epochs=1)(make_gan(draw=draw), JOINT_BATCH // 2)
    if world.is_chief():
        assert seen[: len(drawn[0])] == drawn[0], "the chief's numbers are those of one process"


def _begin_anew():
    """With all generators as they are in a new process; Keras makes one when it is first used."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    keras.random.normal(())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [2, pytest.param(5, marks=pytest.mark.more)])
def test_a_gan_that_is_resumed_ends_as_if_it_had_not_been_stopped(world, tmp_path_factory, steps):
    """In a new process the optimizers are not built yet: the checkpoint tells for which weights."""

    def train(*callbacks):
        keras.utils.set_random_seed(3)
        gan = make_gan(draw=lambda shape, seeds: keras.random.normal(shape, seed=seeds))
        world.distribute(gan)
        told = fit(X, NOISE, callbacks=[*callbacks])(gan, JOINT_BATCH // 2)
        return [array.tobytes() for array in state(gan)], told

    folder = job.collectives().broadcast_object(str(tmp_path_factory.mktemp("saved")), name="test")
    whole = train()
    checkpoint = world.Checkpoint(folder, every_steps=1)
    with pytest.raises(Stop):
        train(checkpoint, StopAfter(steps))
    assert train(checkpoint) == whole


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_models_with_nothing_to_train(world):
    """Frozen weights stay as they are; a layer without any adds a loss."""
    frozen = stack(keras.layers.Dense(3), metrics=["accuracy"])
    frozen.trainable = False
    frozen.compile("adam", "mse", metrics=["mae"])
    before = [array.tobytes() for array in frozen.get_weights()]
    world.distribute(frozen)
    before = job.collectives().broadcast_object([b.hex() for b in before], name="test")
    told = fit(X, X[:, :3])(frozen, JOINT_BATCH // 2)
    assert [array.tobytes().hex() for array in frozen.get_weights()] == before
    assert told["mae"][0] == pytest.approx(told["mae"][1])

    start = keras.Input((6,))
    weightless = keras.Model(start, keras.layers.ReLU()(start))
    weightless.compile("adam", "mse")
    world.distribute(weightless)
    told = fit(X, X)(weightless, JOINT_BATCH // 2)
    assert told["loss"][0] == pytest.approx(np.mean(np.minimum(X, 0) ** 2), rel=1e-5)


@pytest.mark.ranks(2)
def test_what_compute_metrics_adds_is_seen(world):
    class Root(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**results, "root": keras.ops.sqrt(results["mse"])}

    model = Root([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", metrics=["mse"])
    world.distribute(model)
    told = fit(X, X[:, :3], validation_data=(X, X[:, :3]))(model, JOINT_BATCH // 2)
    assert told["root"] == pytest.approx(np.sqrt(told["mse"]), rel=0.05)
    assert told["val_root"] == pytest.approx(np.sqrt(told["val_mse"]), rel=0.05)


@pytest.mark.essential
@pytest.mark.ranks(2)
def test_a_step_that_lets_ranks_drift_apart_is_an_error(world):
    optimizer = keras.optimizers.SGD(0.1)

    class Apart(OwnStep):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=data[1], y_pred=self(data[0]))
            gradients = tape.gradient(loss, self.trainable_variables)
            optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    model = built(Apart())
    world.distribute(model)
    with pytest.raises(ModelError, match=r"kernel of the model '\w+' differs between ranks"):
        fit()(model, JOINT_BATCH // 2)


@pytest.mark.ranks(2)
def test_a_fit_of_the_models_own(world):
    class Repeats(keras.Sequential):
        def fit(self, *args, repeat=1, **options):
            return [super(Repeats, self).fit(*args, **options) for _ in range(repeat)][-1]

    model = Repeats([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", LOSS)
    world.distribute(model)
    with pytest.raises(ModelError, match="Received repeat= for fit"):
        model.fit(X, Y, repeat=2, verbose=0)
    assert len(fit()(model, JOINT_BATCH // 2)["loss"]) == 2


@keras.saving.register_keras_serializable("tests")
class Renamed(keras.optimizers.SGD):
    """An optimizer of the user's own."""


@pytest.mark.ranks(2)
def test_an_optimizer_of_ones_own_is_saved_as_what_it_is(world, tmp_path):
    model = stack(keras.layers.Dense(3), optimizer=Renamed(0.1))
    state = random.getstate()
    world.distribute(model)
    assert random.getstate() == state, "what the program draws next is what it draws alone"
    fit(epochs=1)(model, JOINT_BATCH // 2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is Renamed


@pytest.mark.ranks(2)
def test_what_one_optimizer_alone_can_do_says_so(world):
    gan = make_gan()
    world.distribute(gan)
    with pytest.raises(ModelError, match="WarmUp sets the rate of one optimizer"):
        fit(X, NOISE, callbacks=[world.WarmUp(initial=0.1)])(gan, 6)
    gan.d_optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(ModelError, match="compiled after"):
        fit(X, NOISE)(gan, 6)
    bare = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    bare.compile(optimizer=None)
    with pytest.raises(ModelError, match="has no optimizer"):
        world.distribute(bare)
