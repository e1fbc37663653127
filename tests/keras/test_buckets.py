"""Reducing gradients in buckets changes no bit of the results."""

import keras
import pytest

from hvdtrain import world as job
from tests.keras.features import JOINT_BATCH, OwnStep, classifier, train_arrays
from tests.keras.patterns.pattern import built, state

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
def test_buckets_change_no_bit(world, monkeypatch, way):
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
