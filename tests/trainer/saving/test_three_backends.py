"""The state of a training on each backend of Keras: variables, random states and checkpoints."""

import random

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.errors import CheckpointError
from hvdtrain.trainer.model_sync import broadcast_model
from hvdtrain.trainer.saving.random_state import random_state, restore_random_state
from hvdtrain.trainer.saving.training_state import TrainingState, ignored_random_states
from hvdtrain.trainer.variables import array_of, assign, dtype_of

pytestmark = [pytest.mark.ranks(2), pytest.mark.backends("tensorflow", "torch", "jax")]
ALIGNMENT = 64


def model_of(seed, optimizer="adam"):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(model):
    samples = keras.Variable(0, dtype="int64", trainable=False)
    return TrainingState(model, job.collectives(), samples)


def aligned(value, dtype, count=1 << 12):
    """Return an array at a multiple of 64 bytes, whose memory JAX would use without a copy."""
    dtype = np.dtype(dtype)
    memory = np.zeros(count * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array = memory[start : start + count * dtype.itemsize].view(dtype)
    array[:] = value
    return array


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
def test_a_variable_keeps_a_copy_of_the_array(world, dtype):
    variable = keras.Variable(np.zeros(1 << 12), dtype=dtype, trainable=False)
    array = aligned(1, dtype)
    assign(variable, array)
    array[:] = 0
    value = array_of(variable)
    assert value.dtype == dtype_of(variable)
    assert value.astype("float32").sum() == 1 << 12


def test_the_chiefs_values_reach_all_ranks(world):
    model = model_of(seed=world.rank())
    dropout = array_of(model.layers[1].seed_generator.state).copy()
    broadcast_model(model, job.collectives())
    values = [array_of(v) for v in (*model.weights[:2], *model.optimizer.variables)]
    of_ranks = job.collectives().allgather_object(
        [v.tobytes().hex() for v in values], name="values"
    )
    assert of_ranks[0] == of_ranks[1]
    np.testing.assert_array_equal(array_of(model.layers[1].seed_generator.state), dropout)


def draw():
    """Draw from every generator. Gaussian numbers come in pairs, so an odd number is drawn."""
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()]
    numbers.append(keras.ops.convert_to_numpy(keras.random.normal([])))
    if keras.backend.backend() == "torch":
        import torch

        numbers.append(torch.rand([]))
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        numbers.append(tf.random.uniform([]))
    return [float(number) for number in numbers]


@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_random_states_are_restored(world, drawn_before):
    keras.utils.set_random_seed(7)
    for _ in range(drawn_before):
        draw()
    state = random_state()
    expected = [draw(), draw()]
    keras.utils.set_random_seed(8)
    restore_random_state(state)
    assert [draw(), draw()] == expected
    assert {k: (a.shape, a.dtype) for k, a in random_state().items()} == {
        k: (a.shape, a.dtype) for k, a in state.items()
    }


def test_a_snapshot_does_not_change_with_the_model(world):
    model = model_of(3)
    state = state_of(model)
    shared, own = state.shared(), state.copy_own()
    before = {key: array.copy() for key, array in (shared | own).items()}
    for variable in (*model.weights, *model.optimizer.variables):
        assign(variable, array_of(variable) + 1)
    for key, array in (shared | own).items():
        np.testing.assert_array_equal(array, before[key], err_msg=key)


def test_a_state_is_restored_on_all_ranks(world):
    model = model_of(3)
    assign(model.layers[2].moving_mean, np.full(4, 1.0 + world.rank()))
    state = state_of(model)
    saved, ranks = state.shared(), state.gather_own()
    other = model_of(4 + world.rank())
    restored = state_of(other)
    is_chief = world.is_chief()
    restored.restore_shared(saved if is_chief else None)
    restored.restore_own(ranks if is_chief else None, 2)
    for before, after in zip(
        [*model.weights, *model.optimizer.variables], [*other.weights, *other.optimizer.variables]
    ):
        np.testing.assert_array_equal(array_of(before), array_of(after), err_msg=before.path)
    assert state.accumulates is False


def test_integers_of_other_backends_are_converted(world):
    """TensorFlow counts iterations with 64 bits, torch and JAX with 32 bits."""
    state = state_of(model_of(3))
    other = {"int32": "int64", "int64": "int32", "uint32": "int64"}

    def converted(values):
        return {k: a.astype(other.get(a.dtype.name, a.dtype)) for k, a in values.items()}

    saved, ranks = converted(state.shared()), converted(state.gather_own())
    state.check(saved)
    state.restore_shared(saved if world.is_chief() else None)
    state.restore_own(ranks if world.is_chief() else None, 2)
    key = next(key for key in saved if key.startswith("weights"))
    with pytest.raises(CheckpointError, match="must be float32"):
        state.check({**saved, key: saved[key].astype("float16")})


def test_random_states_of_other_backends_are_listed(world):
    names = ["python", "tensorflow", "tensorflow seed", "torch", "torch gpu"]
    own = {"tensorflow": names[1:3], "torch": names[3:]}.get(keras.backend.backend(), [])
    ignored = ignored_random_states([f"rank/0/random/{name}" for name in names])
    assert ignored == sorted(set(names) - {"python", *own})
