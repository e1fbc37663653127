"""Training with compressed gradients, in which each rank counts as a host."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as job
from hvdtrain.collectives.engine import single_engine
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.gradients.powersgd import PowerSGD
from hvdtrain.trainer.backends.tensorflow import gradient_tape
from hvdtrain.trainer.saving.checkpoint_callback import Checkpoint
from hvdtrain.trainer.saving.training_state import TrainingState, unsent_of
from tests.trainer.equivalence import alike
from tests.trainer.saving.runs import Stop, StopAfter, X, Y, model_of, outcome, run

FORM = "powersgd:1"


@pytest.fixture
def compressed(world: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that sets ``--compression`` in a job of several hosts."""

    def turn(form: str) -> Any:
        settings = dataclasses.replace(job.settings(), compression=form)
        changed = {"settings": settings, "hosts": tuple(range(job.size()))}
        monkeypatch.setattr(job, "_world", dataclasses.replace(job._world, **changed))
        monkeypatch.setattr(gradient_tape, "_reducers", {})
        return world

    return turn


def make(**options: Any) -> keras.Model:
    options.setdefault("optimizer", keras.optimizers.SGD(0.05, momentum=0.9))
    return model_of([keras.layers.Dense(40, "relu"), keras.layers.Dropout(0.1)], **options)


def fit(*callbacks: Any, epochs: int = 3) -> Any:
    options = {"batch_size": 6, "epochs": epochs, "callbacks": [*callbacks], "verbose": 0}
    return lambda model: model.fit(X, Y, **options)


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "accumulation": lambda: {"optimizer": sgd(gradient_accumulation_steps=2)},
    "clipping": lambda: {"optimizer": sgd(global_clipnorm=0.5)},
    "loss scaling": lambda: {"optimizer": keras.optimizers.LossScaleOptimizer(sgd())},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "way",
    ["plain", *(pytest.param(way, marks=pytest.mark.more) for way in WAYS if way != "plain")],
)
def test_compressed_training_keeps_ranks_equal_and_learns_nearly_as_fast(compressed, way):
    losses = []
    for compression in ("none", FORM):
        world = compressed(compression)
        model, history = run(world, lambda: make(**WAYS[way]()), fit(epochs=10), seed=1)
        losses.append(history.history["loss"])
        assert alike(model)
    (_, *exact), (_, *nearly) = losses
    assert nearly != exact
    assert exact[-1] < 0.8 * losses[0][0]
    assert nearly[-1] == pytest.approx(exact[-1], abs=0.05)


@pytest.mark.ranks(2)
def test_a_resumed_training_equals_an_uninterrupted_one(compressed, tmp_path, caplog):
    world = compressed(FORM)
    whole = outcome(*run(world, make, fit(), seed=1))
    with pytest.raises(Stop):
        run(world, make, fit(Checkpoint(tmp_path, every_steps=2), StopAfter(9)), seed=1)
    # Use a different seed, because the state must come from the checkpoint.
    resumed = outcome(*run(world, make, fit(Checkpoint(tmp_path, every_steps=2)), seed=9))
    for name in whole:
        assert resumed[name] == whole[name], name
    left_out = "residuals of compressed gradients in the checkpoint are ignored"
    assert left_out not in caplog.text
    run(compressed("none"), make, fit(Checkpoint(tmp_path), epochs=4), seed=9)
    assert (left_out in caplog.text) == (world.rank() == 0)


@pytest.mark.ranks(2)
def test_a_tape_and_an_optimizer_in_a_custom_loop(compressed):
    world = compressed(FORM)
    model = make()
    world.broadcast_variables(model.variables)
    optimizer = world.DistributedOptimizer(keras.optimizers.SGD(0.05))
    optimizer.build(model.trainable_variables)
    by_tape, by_optimizer = [], []
    for _ in range(2):
        with tf.GradientTape(persistent=True) as recorded:
            loss = tf.reduce_mean(model(X[world.rank() :: 2]) ** 2)
        own = recorded.gradient(loss, model.trainable_variables)
        distributed = world.DistributedGradientTape(recorded)
        by_tape.append(distributed.gradient(loss, model.trainable_variables))
        before = [v.numpy() for v in model.trainable_variables]
        optimizer.apply(own)
        after = [v.numpy() for v in model.trainable_variables]
        by_optimizer.append([(a - b) / 0.05 for a, b in zip(before, after)])
    assert alike(model)
    for one, other in zip(by_tape, by_optimizer):
        for tapes, optimizers in zip(one, other):
            np.testing.assert_allclose(tapes, optimizers, atol=1e-4)


def test_resuming_on_a_different_number_of_ranks_restores_the_mean_residual():
    def state_of() -> tuple[TrainingState, ErrorFeedback, list[Any]]:
        model, feedback = make(), ErrorFeedback(PowerSGD(1))
        samples = keras.Variable(0, dtype="int64", trainable=False)
        state = TrainingState(model, single_engine(), samples, feedback=feedback)
        return state, feedback, model.trainable_variables

    state, feedback, variables = state_of()
    kernel, _, last, _ = variables
    saved: dict[str, np.ndarray] = {}
    for rank in range(3):
        for variable in (kernel, last):
            for array in feedback.keep(variable):
                array.assign(np.full(array.value.shape, [1, 2, 6][rank], np.float32))
        own = state.gather_own()
        saved.update({key.replace("rank/0", f"rank/{rank}", 1): own[key].copy() for key in own})
    assert unsent_of(saved) == [0, 2]
    state, feedback, variables = state_of()
    state.allocate_residuals(unsent_of(saved))
    state.restore_part(saved, 3, rank=1, size=2)
    for variable in (variables[0], variables[2]):
        unsent, factors = feedback.keep(variable)
        assert (unsent.value == 3).all()
        assert factors.value.shape == (variable.shape[1], 1)
        assert factors.value.any()


SCRIPT = """
    import dataclasses
    import json
    import os
    import signal

    import keras
    import numpy as np

    import hvdtrain
    from hvdtrain import world

    hvdtrain.init()
    me = hvdtrain.rank()
    x = np.random.default_rng(2).normal(size=(96, 6)).astype("float32")


    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if me == 0 and batch == 3:
                os.kill(os.getpid(), signal.SIGKILL)


    def train(*callbacks):
        settings = dataclasses.replace(world.settings(), compression="powersgd:1")
        # As if each rank had its own host.
        world._world = dataclasses.replace(world._world, settings=settings, hosts=(0, 1, 2))
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(40, "relu"), keras.layers.Dense(6)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.2), "mse")
        hvdtrain.distribute(model)
        history = model.fit(x, x, batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
        own = [w.tobytes().hex() for w in model.get_weights()]
        equal = world.collectives().allgather_object(own) == [own] * hvdtrain.size()
        kept = model.optimizer._hvdtrain_reducer.feedback.arrays(model.trainable_variables)
        assert all(array.value.any() for name, array in kept.items() if "0000" in name)
        return equal, history.history["loss"]


    results = [train(Dies()), train()]
    if hvdtrain.is_chief():
        print(json.dumps({"size": hvdtrain.size(), "results": results}))
"""


@pytest.mark.mpi
def test_training_continues_without_a_lost_rank_and_its_residual(elastic):
    done = elastic(SCRIPT)
    assert done.returncode == 0, done
    (report,) = [json.loads(s[s.index("{") :]) for s in done.stdout.splitlines() if "{" in s]
    assert report["size"] == 2
    for equal, losses in report["results"]:
        assert equal
        assert losses[-1] < 0.5 * losses[0]
