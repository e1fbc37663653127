"""Training on N ranks equals one process on the joint batch."""

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from tests.keras.equivalence import alike, distance, train_both


@pytest.fixture
def in_buckets(world, monkeypatch):
    """Gradients go in buckets, as between hosts."""
    monkeypatch.setattr(job.collectives(), "bucket_bytes", 300)


# AdamW has clipping and averages of the weights as well; the others differ from it in Keras' rule.
@pytest.mark.more
@pytest.mark.ranks(2)
def test_training_equals_one_process(world):
    equals_one_process(world, "adamw", "accumulation")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("optimizer", "case"),
    [
        ("sgd", "accumulation"),
        ("adamw", "steps_per_execution"),
        pytest.param("adam", "jit", marks=pytest.mark.more),
    ],
)
def test_so_it_does_in_buckets(world, in_buckets, optimizer, case):
    equals_one_process(world, optimizer, case)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("optimizer", "case"),
    [
        pytest.param("adam", "uneven", marks=pytest.mark.essential),
        ("momentum", "sample_weight"),
    ],
)
def test_and_on_three_ranks(world, in_buckets, optimizer, case):
    equals_one_process(world, optimizer, case)


@pytest.mark.more
@pytest.mark.ranks(4)
def test_and_on_four(world, in_buckets):
    equals_one_process(world, "adamw", "uneven")


def equals_one_process(world, optimizer, case):
    together, reference, joint, alone = train_both(world, optimizer, case)
    assert distance(together, reference) <= 1e-5
    assert alike(together)
    assert joint.keys() == alone.keys()
    for name, values in alone.items():
        if case == "uneven" and name.endswith("_loss"):
            continue  # Keras gives the short last batch as much weight as the others
        if name.endswith("accuracy"):
            assert joint[name] == pytest.approx(values, abs=1e-6)
        else:
            np.testing.assert_allclose(joint[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.ranks(3)
def test_training_in_float64_equals_one_process_to_rounding(world):
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        together, reference, _, _ = train_both(world, "adamw", "uneven", "float64")
        assert distance(together, reference) <= 1e-10
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
