"""Horovod's elastic callbacks around a plain ``fit``, on ranks that really die."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd


def test_callbacks_keep_the_state():
    hvd.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    state = hvd.elastic.KerasState(model, batch=7, epoch=4)
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(state.batch)

    commits = []
    state.commit = lambda: commits.append((state.epoch, state.batch))
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
        Sees(),
    ]
    x = np.ones((8, 2))
    for _ in range(2):
        model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    assert seen == [0, 1, 2, 3] * 4
    assert state.epoch == 8
    assert state.batch == 0
    # Counted on through the end of an epoch, and anew in each fit.
    assert commits == [(4, 2), (5, 0), (5, 1), (6, 0), (6, 2), (7, 0), (7, 1), (8, 0)]


FIT = """
import json, os, signal, sys
import keras, numpy as np
import hvdtrain.keras as hvd

hvd.init()
me, dies = hvd.rank(), int(sys.argv[1])
keras.utils.set_random_seed(me)  # elastic.run sees to it that all begin alike
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size())), "mse")
rng = np.random.default_rng(me)
x = rng.normal(size=(40, 4)).astype("float32")
y = x @ np.arange(4.0, dtype="float32")[:, None]
fits, resets = [], []


class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if me == dies and state.epoch == 1 and batch == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def scale():
    resets.append(hvd.size())
    model.optimizer.learning_rate = 0.05 * hvd.size()


@hvd.elastic.run
def train(state):
    fits.append([state.epoch, state.batch])
    model.fit(
        x, y, batch_size=4, verbose=0, epochs=6 - state.epoch,
        callbacks=[
            Dies(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
        ],
    )


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([scale])
train(state)
loss = model.evaluate(x, y, verbose=0)
weights = [w.tolist() for w in model.get_weights()]
mean = hvd.allreduce(np.array(weights[0]), op=hvd.Average)
assert mean.numpy().tolist() == weights[0]
rate = float(model.optimizer.learning_rate.numpy())
print("=" + json.dumps([me, hvd.rank(), fits, resets, state.epoch, rate, loss]), flush=True)
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dies", [0, 2])
def test_fit_goes_on_without_a_rank(elastic, dies):
    done = elastic(FIT, "--chief-only", arguments=[str(dies)])
    assert done.returncode == 0, done
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("="))
    me, rank, fits, resets, epoch, rate, loss = json.loads(line[1:])
    assert (me, rank) == (0 if dies else 1, 0)
    # The commit after the fifth step is the first after the loss, in the middle of an epoch.
    assert fits == [[0, 0], [1, 4]]
    assert resets == [2]
    assert epoch == 6
    assert rate == pytest.approx(0.1)
    assert loss < 0.5
