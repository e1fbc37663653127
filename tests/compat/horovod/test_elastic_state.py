"""Horovod's elastic state, on ranks that are killed."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.errors import RanksLostError

several = pytest.mark.ranks(1, 2)


@several
def test_run_broadcasts_the_state_of_rank_0(world):
    variables = [tf.Variable([hvd.rank() + 1.0, 2.0])]
    state = hvd.elastic.TensorFlowState(variables, batch=hvd.rank() + 5, name=f"of {hvd.rank()}")
    calls = []

    @hvd.elastic.run
    def train(state, more, *, last):
        calls.append((state.batch, state.name, more, last))
        state.commit()
        return float(variables[0][0])

    assert train(state, 1, last=2) == 1.0
    assert calls == [(5, "of 0", 1, 2)]


def test_restore_returns_to_the_last_commit():
    hvd.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5))
    state = hvd.elastic.TensorFlowKerasState(model, batch=0)

    def step():
        model.optimizer.apply([tf.ones((2, 1))], model.trainable_variables)
        state.batch += 1

    step()
    state.commit()
    committed = [np.array(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]
    step()
    state.restore()
    assert state.batch == 1
    for value, variable in zip(committed, [*model.variables, *model.optimizer.variables]):
        np.testing.assert_array_equal(value, variable.numpy())
    assert int(model.optimizer.iterations.numpy()) == 1


def test_other_errors_are_raised():
    hvd.init()
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        raise tf.errors.UnknownError(None, None, "ValueError: bad batch")

    with pytest.raises(tf.errors.UnknownError, match="bad batch"):
        train(hvd.elastic.ObjectState())
    assert calls == [1]
    assert hvd.elastic.HorovodInternalError is RanksLostError


def test_invalid_states():
    with pytest.raises(ValueError, match="requires variables"):
        hvd.elastic.TensorFlowState()
    with pytest.raises(ValueError, match="is not built"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))


LOOP = """
import json, os, signal, sys
import keras, numpy as np, tensorflow as tf
import hvdtrain.tensorflow as hvd

hvd.init()
rank, killed_rank, mode = hvd.rank(), int(sys.argv[1]), sys.argv[2]
STEPS, KILL_STEP = 12, 6  # KILL_STEP is the first step without the killed rank
x = np.random.default_rng(1).normal(size=(STEPS, 3, 5, 4)).astype("float32")
calls, resets, done = [], [], []


def make():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    return model, keras.optimizers.SGD(0.1, momentum=0.5)


def step(model, optimizer, samples, tape):
    with tape:
        loss = tf.reduce_mean(model(samples, training=True) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


broadcast = hvd.broadcast if mode == "eager" else tf.function(hvd.broadcast)


@hvd.elastic.run
def train(state):
    calls.append(state.step)
    while state.step < STEPS:
        if state.step == KILL_STEP and rank == killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == KILL_STEP and mode != "commit" and not resets:
            broadcast(tf.ones(3), 0)
        step(model, optimizer, x[state.step, rank], hvd.DistributedGradientTape(tf.GradientTape()))
        done.append(state.step)
        state.step += 1
        if state.step % 4 == 0:
            state.commit()


model, optimizer = make()
optimizer.build(model.trainable_variables)
state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)

# One process trains on the samples of the ranks of each step.
reference, plain = make()
first_without = KILL_STEP if mode == "commit" else 4  # all return to the commit of step 4
for number in range(STEPS):
    ranks = [r for r in range(3) if number < first_without or r != killed_rank]
    step(reference, plain, np.concatenate(x[number, ranks]), tf.GradientTape())
for weight, expected in zip(model.get_weights(), reference.get_weights()):
    np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)
print("=" + json.dumps([rank, hvd.rank(), calls, resets, done]), flush=True)
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("killed_rank", "mode"), [(2, "commit"), (0, "commit"), (0, "eager"), (0, "graph")]
)
def test_training_continues_without_a_lost_rank(elastic, killed_rank, mode):
    """Steps are repeated only if a collective could not be completed."""
    done = elastic(LOOP, "--chief-only", arguments=[str(killed_rank), mode])
    assert done.returncode == 0, done
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("="))
    first_rank, rank, calls, resets, steps = json.loads(line[1:])
    assert rank == 0
    assert first_rank == (0 if killed_rank else 1)
    assert resets == [2]
    if mode == "commit":
        assert calls == [0, 8]
        assert steps == list(range(12))
    else:
        assert calls == [0, 4]
        assert steps == [*range(6), *range(4, 12)]
