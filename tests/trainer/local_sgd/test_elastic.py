"""A rank that dies within a round: the average without it, and the use of its samples."""

from __future__ import annotations

import json

import pytest

# Each sample has its own weight, and a step with the sample adds -1 to it.
SCRIPT = """
    import json
    import os
    import signal

    import keras
    import numpy as np
    import tensorflow as tf

    import hvdtrain

    ROWS, BATCH = 101, 4
    hvdtrain.init()
    me = hvdtrain.rank()


    class Total(keras.losses.Loss):
        # Not a callback, whose hooks for batches would detect the lost rank within the round.
        def __init__(self, who):
            super().__init__(reduction="sum")
            self.who, self.steps = who, 0

        def call(self, y_true, y_pred):
            tf.numpy_function(self.count, [], [])
            return y_pred[:, 0] + y_true[:, 0]

        def count(self):
            self.steps += 1
            if me == self.who and self.steps == 7:
                os.kill(os.getpid(), signal.SIGKILL)


    def train(who):
        keras.utils.set_random_seed(3)
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((ROWS,)), dense])
        model.compile(keras.optimizers.SGD(1.0), Total(who))
        hvdtrain.distribute(model)
        x, y = np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        return (-model.get_weights()[0].reshape(-1)).tolist()


    counts = [train(2), train(0)]
    print(json.dumps({"size": hvdtrain.size(), "chief": hvdtrain.is_chief(), "counts": counts}))
"""


@pytest.mark.mpi
def test_training_continues_without_a_rank_and_uses_its_samples(elastic):
    done = elastic(SCRIPT, "--mode", "local-sgd", "--sync-every", "4")
    assert done.returncode == 0, done
    (result,) = [json.loads(s[s.index("{") :]) for s in done.stdout.splitlines() if "{" in s]
    assert (result["size"], result["chief"]) == (1, True)
    # Each sample is used once. A rank was lost in the second round, so the sums of that round were
    # scaled for one rank more than the average contains.
    for counts, before, after in zip(result["counts"], (3, 2), (2, 1)):
        scaled = before / after
        assert sorted(set(counts)) == [1.0, scaled]
        assert counts.count(scaled) == after * 4 * 4
