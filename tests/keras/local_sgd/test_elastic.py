"""A rank that dies within a round is left out of the average, and its samples are done again."""

from __future__ import annotations

import json

import pytest

# Every sample has a weight of its own, to which a step with the sample adds -1.
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
        # Not a callback: with hooks for batches ranks would learn of the loss within the round.
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


    visits = [train(2), train(0)]
    print(json.dumps({"size": hvdtrain.size(), "chief": hvdtrain.is_chief(), "visits": visits}))
"""


@pytest.mark.mpi
def test_training_goes_on_without_a_rank_and_does_its_samples(elastic):
    done = elastic(SCRIPT, "--mode", "local-sgd", "--sync-every", "4")
    assert done.returncode == 0, done
    (told,) = [json.loads(s[s.index("{") :]) for s in done.stdout.splitlines() if "{" in s]
    assert (told["size"], told["chief"]) == (1, True)
    # Each sample is trained on once. In the round in which a rank was lost, the second, what the
    # others did was to count as a part of more ranks than there were in the average.
    for visits, before, after in zip(told["visits"], (3, 2), (2, 1)):
        more = before / after
        assert sorted(set(visits)) == [1.0, more]
        assert visits.count(more) == after * 4 * 4
