"""Programs from Keras' guides on two ranks, compared with one process."""

import os
import random

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.errors import ModelError
from hvdtrain.frameworks import of_keras
from tests.trainer.equivalence import check_close, from_chief
from tests.trainer.features import JOINT_BATCH, X, Y
from tests.trainer.own_steps import OwnStep, minimize, own_steps
from tests.trainer.patterns import PATTERNS
from tests.trainer.patterns.pattern import (
    LOSS,
    NOISE,
    SEQUENCES,
    built,
    fit,
    outcome,
    stack,
    state,
)
from tests.trainer.patterns.steps import make_gan
from tests.trainer.saving.runs import Stop, StopAfter

on_all_backends = pytest.mark.backends("tensorflow", "torch", "jax")


def _of_backend(name):
    """Return the patterns that work with a backend in one process."""
    return [pattern for pattern in PATTERNS if name in PATTERNS[pattern].backends]


# Torch and JAX run the patterns that reach code that no other reaches, and those with states,
# masks and overflows. To run all of them, set HVDTRAIN_TEST_ALL_PATTERNS=1.
def _chosen(backend, others, often=None):
    """Return the first ``often`` patterns that run often (None: all of these), and ``others``."""
    names = _of_backend(backend)
    if os.environ.get("HVDTRAIN_TEST_ALL_PATTERNS"):
        return names
    return dict.fromkeys([*[name for name in names if PATTERNS[name].often][:often], *others])


_ON_TORCH = _chosen(
    "torch",
    [
        *("own trackers", "an own prediction step", "GAN with a LossScaleOptimizer"),
        *("losses and metrics of layers", "losses that are means by sample weights"),
        *("masked outputs of each time step", "recurrent layers with masks and states"),
        *(
            "a compiled loop with the losses of layers",
            "each rank's own rows",
            "preprocessing layers",
        ),
        *("a model that is never called before fit", "an own compute_loss", "a loss function"),
        *(
            "evaluate and predict",
            "steps_per_epoch and validation_steps",
            "frozen, then fine-tuned",
        ),
        *("a loss that is not a number", "an output without a loss", "gradient accumulation"),
        *("optimizers by variable, of new kinds", "LossScaleOptimizer with clipping", "generators"),
        *("a PyDataset", "a pipeline of tf.data", "tensors with class weights"),
    ],
)
_ON_JAX = _chosen(
    "jax",
    [
        *("each rank's own rows", "evaluate and predict", "a PyDataset", "an own compute_loss"),
        *("masked outputs of each time step", "an overflow on one rank"),
    ],
    often=6,
)


def _marked(name):
    return pytest.param(name, marks=() if PATTERNS[name].often else pytest.mark.more)


@pytest.mark.ranks(2)
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("name", [*map(_marked, _of_backend("tensorflow"))])
def test_a_pattern_of_keras_guides(world, keras_backend, name):
    equals_one_process(world, keras_backend, PATTERNS[name])


@pytest.mark.ranks(2)
@pytest.mark.backends("torch")
@pytest.mark.parametrize("name", [*map(_marked, _ON_TORCH)])
def test_a_pattern_on_torch(world, keras_backend, name):
    equals_one_process(world, keras_backend, PATTERNS[name])


@pytest.mark.ranks(2)
@pytest.mark.backends("jax")
@pytest.mark.parametrize("name", [*_ON_JAX])
def test_a_pattern_on_jax(world, keras_backend, name):
    equals_one_process(world, keras_backend, PATTERNS[name])


def equals_one_process(world, keras_backend, pattern):
    if pattern.since > tuple(map(int, keras.version().split(".")[:2])):
        pytest.skip(f"not supported by Keras {keras.version()}")
    keras.utils.set_random_seed(3)
    alone = None
    if world.is_chief():
        model = pattern.make()
        # JAX compiles each operation of an eager step, which takes longer.
        model.run_eagerly = pattern.eager and keras_backend != "jax"
        alone = outcome(pattern.train(model, JOINT_BATCH)), state(model)
    expected, state_alone = from_chief(alone)
    # Resets the counters in names, which are higher on the chief.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    together = pattern.make()
    world.distribute(together, presharded=pattern.presharded)
    results = outcome(pattern.train(together, JOINT_BATCH // world.size()))
    check_close(state(together), state_alone, "state")
    check_close(results, expected)
    # Adding 0 makes zeros positive: torch resets accumulated gradients by multiplying them by 0.
    digests = [(array + 0).tobytes().hex() for array in state(together)]
    assert job.collectives().allgather_object(digests, name="test") == [digests] * world.size()


@pytest.mark.ranks(2)
@pytest.mark.more
@pytest.mark.backends("tensorflow", "jax")  # Keras can't train these layers on torch
def test_stateful_recurrent_layers_have_states_on_each_rank(world):
    class Reset(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.layers[0].reset_state()

    def train(size, distribute):
        keras.utils.set_random_seed(3)
        start = keras.Input(batch_shape=(size, 5, 3))
        model = stack(keras.layers.GRU(3, stateful=True), keras.layers.Dense(3), start=start)
        distribute(model)
        history = fit(SEQUENCES[:48], Y[:48], epochs=4, callbacks=[Reset()])(model, size)
        return {"state": state(model), "loss": history["loss"]}

    alone = train(JOINT_BATCH, lambda model: None)
    together = train(JOINT_BATCH // 2, world.distribute)
    check_close(together, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "source",
    [
        "generator of the model",
        *(pytest.param(name, marks=pytest.mark.more) for name in ("keras.random", "framework")),
    ],
)
@on_all_backends
def test_random_numbers_of_a_step_differ_between_ranks(world, keras_backend, source):
    if (keras_backend, source) in (("jax", "framework"), ("jax", "keras.random")):
        pytest.skip("compiled code of JAX needs a generator")
    if (keras_backend, source) == ("torch", "framework"):
        pytest.skip("with a seed, torch.randn draws the same numbers on all ranks")
    draws = {
        "generator of the model": lambda shape, seeds: keras.random.normal(shape, seed=seeds),
        "keras.random": lambda shape, seeds: keras.random.normal(shape),
        "framework": lambda shape, seeds: draw_without_keras(shape),
    }
    seen = []

    def record(array):
        seen.append(array[0].tolist())
        return []

    def draw(shape, seeds):
        noise = draws[source](shape, seeds)
        of_keras().run_on_host(record, [noise], [])
        return noise

    _reset_generators()
    gan = make_gan(draw=draw)
    world.distribute(gan)
    fit(X, NOISE, epochs=1)(gan, JOINT_BATCH // 2)
    drawn = job.collectives().allgather_object(seen, name="test")
    assert len(drawn[0]) == len(drawn[1]) >= 5
    assert not any(one == other for one in drawn[0] for other in drawn[1])
    _reset_generators()
    seen.clear()
    fit(X, NOISE, epochs=1)(make_gan(draw=draw), JOINT_BATCH // 2)
    if world.is_chief():
        assert seen[: len(drawn[0])] == drawn[0], "the chief draws other numbers than one process"


def draw_without_keras(shape):
    if keras.backend.backend() == "torch":
        import torch

        return torch.randn(tuple(shape))
    import tensorflow as tf

    return tf.random.normal(shape)


def _reset_generators():
    """Reset all generators, including Keras' global one."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    keras.random.normal(())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [2, pytest.param(5, marks=pytest.mark.more)])
@pytest.mark.backends("tensorflow", "torch")
def test_a_resumed_gan_equals_an_uninterrupted_one(world, tmp_path_factory, steps):
    # The optimizers are not built yet when training resumes.
    def train(*callbacks):
        keras.utils.set_random_seed(3)
        gan = make_gan(draw=lambda shape, seeds: keras.random.normal(shape, seed=seeds))
        world.distribute(gan)
        history = fit(X, NOISE, callbacks=[*callbacks])(gan, JOINT_BATCH // 2)
        return [array.tobytes() for array in state(gan)], history

    folder = job.collectives().broadcast_object(str(tmp_path_factory.mktemp("saved")), name="test")
    whole = train()
    checkpoint = world.Checkpoint(folder, every_steps=1)
    with pytest.raises(Stop):
        train(checkpoint, StopAfter(steps))
    assert train(checkpoint) == whole


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@on_all_backends
def test_models_without_trainable_weights(world):
    frozen = stack(keras.layers.Dense(3), metrics=["accuracy"])
    frozen.trainable = False
    frozen.compile("adam", "mse", metrics=["mae"])
    before = [array.tobytes() for array in frozen.get_weights()]
    world.distribute(frozen)
    before = job.collectives().broadcast_object([b.hex() for b in before], name="test")
    history = fit(X, X[:, :3])(frozen, JOINT_BATCH // 2)
    assert [array.tobytes().hex() for array in frozen.get_weights()] == before
    assert history["mae"][0] == pytest.approx(history["mae"][1])

    start = keras.Input((6,))
    weightless = keras.Model(start, keras.layers.ReLU()(start))
    weightless.compile("adam", "mse")
    world.distribute(weightless)
    history = fit(X, X)(weightless, JOINT_BATCH // 2)
    assert history["loss"][0] == pytest.approx(np.mean(np.minimum(X, 0) ** 2), rel=1e-5)


@pytest.mark.ranks(2)
@on_all_backends
def test_metrics_added_by_compute_metrics_are_in_the_history(world):
    class Root(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**results, "root": keras.ops.sqrt(results["mse"])}

    model = Root([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", metrics=["mse"])
    world.distribute(model)
    history = fit(X, X[:, :3], validation_data=(X, X[:, :3]))(model, JOINT_BATCH // 2)
    assert history["root"] == pytest.approx(np.sqrt(history["mse"]), rel=0.05)
    assert history["val_root"] == pytest.approx(np.sqrt(history["val_mse"]), rel=0.05)


@pytest.mark.essential
@pytest.mark.ranks(2)
@on_all_backends
def test_a_train_step_that_averages_nothing_is_an_error(world):
    optimizer = keras.optimizers.SGD(0.1)

    @own_steps
    class Apart(OwnStep):
        def train_step(self, data):
            (loss,) = minimize(
                self,
                optimizer,
                self.trainable_variables,
                lambda: (self.compute_loss(y=data[1], y_pred=self(data[0])),),
            )
            return {"loss": loss}

    model = built(Apart())
    world.distribute(model)
    with pytest.raises(ModelError, match=r"kernel of the model '\w+' differs between ranks"):
        fit()(model, JOINT_BATCH // 2)


@pytest.mark.ranks(2)
@on_all_backends
def test_arguments_of_an_overridden_fit_are_an_error(world):
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
    """A user-defined optimizer."""


@pytest.mark.ranks(2)
@on_all_backends
def test_a_user_defined_optimizer_is_saved_by_its_name(world, tmp_path):
    model = stack(keras.layers.Dense(3), optimizer=Renamed(0.1))
    state = random.getstate()
    world.distribute(model)
    assert random.getstate() == state, "distribute changes the program's random numbers"
    fit(epochs=1)(model, JOINT_BATCH // 2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is Renamed


@pytest.mark.ranks(2)
@on_all_backends
def test_errors_about_optimizers(world):
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
