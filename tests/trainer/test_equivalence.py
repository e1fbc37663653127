"""The equivalence of training on N ranks and in one process on the joint batch."""

from collections import Counter

import keras
import pytest

from hvdtrain import world as job
from tests.trainer.equivalence import STEPS, TOLERANCE, alike, check_close, distance, train_both
from tests.trainer.features import JOINT_BATCH, classifier, train_arrays
from tests.trainer.own_steps import OwnStep
from tests.trainer.patterns.pattern import built, state


@pytest.fixture
def in_buckets(world, monkeypatch):
    """Reduce gradients in buckets, as between hosts."""
    monkeypatch.setattr(job.collectives(), "bucket_bytes", 300)


@pytest.mark.ranks(2)
@pytest.mark.backends("torch", "jax")
@pytest.mark.parametrize("case", ["accumulation", "steps_per_execution"])
def test_two_ranks_equal_one_process_on_other_backends(world, in_buckets, keras_backend, case):
    if (keras_backend, case) == ("torch", "steps_per_execution"):
        pytest.skip("not supported by Keras on torch")
    titles: list[str] = []
    observers = job.collectives().observers
    observers.append(lambda operation: titles.append(operation.title))
    try:
        equals_one_process(world, "sgd", case)
    finally:
        observers.pop()
    in_fit = titles[titles.index("begin(fit)") : titles.index("barrier(end of fit)")]
    steps = in_fit[in_fit.index("allreduce(gradients)") :]
    # Synchronized layers exchange their moments in each step.
    counts = Counter(title for title in steps if "normalization" not in title)
    assert counts.pop("allreduce(gradients)") == (STEPS // 2 if case == "accumulation" else STEPS)
    assert counts["allreduce(metrics)"] == 1
    assert max(counts.values()) <= 2, "steps exchange more than gradients"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("optimizer", "case"),
    [
        ("sgd", "accumulation"),
        ("adamw", "steps_per_execution"),  # it also clips and averages weights
        ("momentum", "sample_weight"),
        pytest.param("adam", "jit", marks=pytest.mark.more),
    ],
)
def test_two_ranks_with_buckets_equal_one_process(world, in_buckets, optimizer, case):
    equals_one_process(world, optimizer, case)


@pytest.mark.ranks(3)
@pytest.mark.backends("torch")
def test_three_ranks_equal_one_process_on_torch(world, in_buckets, keras_backend):
    equals_one_process(world, "adam", "uneven")


@pytest.mark.essential
@pytest.mark.ranks(3)
def test_three_ranks_equal_one_process(world, in_buckets):
    equals_one_process(world, "adam", "uneven")


def equals_one_process(world, optimizer, case):
    together, reference, joint, alone = train_both(world, optimizer, case)
    assert distance(together, reference) <= TOLERANCE
    assert alike(together)
    assert joint.keys() == alone.keys()
    # Keras weights the short last batch as a full one in the losses of single outputs.
    compared = [name for name in alone if case != "uneven" or not name.endswith("_loss")]
    check_close({name: joint[name] for name in compared}, {name: alone[name] for name in compared})


@pytest.mark.ranks(3)
def test_float64_training_equals_one_process_up_to_rounding(world):
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        together, reference, _, _ = train_both(world, "adamw", "uneven", "float64")
        assert distance(together, reference) <= 1e-10
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


WAYS = {
    "clipping": lambda: classifier(optimizer=keras.optimizers.Adam(0.1, global_clipnorm=0.05)),
    "loss scaling": lambda: classifier(
        optimizer=keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=2.0**10
        )
    ),
    "accumulation": lambda: classifier(
        optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    ),
    "own step": lambda: built(OwnStep()),
}


@pytest.mark.more
@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_training_with_buckets_is_bitwise_equal(world, monkeypatch, way):
    states = []
    for size in (0, 8):
        monkeypatch.setattr(job.collectives(), "bucket_bytes", size)
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        model = WAYS[way]()
        world.distribute(model)
        train_arrays(model, JOINT_BATCH // 2)
        states.append([array.tobytes() for array in state(model)])
    assert states[0] == states[1]
