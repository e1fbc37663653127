"""Horovod's elastic callbacks in a plain ``fit``, on ranks that are killed."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd


def test_callbacks_update_the_state():
    hvd.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    state = hvd.elastic.KerasState(model, batch=7, epoch=4)
    batches = []

    class RecordsBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(state.batch)

    commits = []
    state.commit = lambda: commits.append((state.epoch, state.batch))
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
        RecordsBatch(),
    ]
    x = np.ones((8, 2))
    for _ in range(2):
        model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    assert batches == [0, 1, 2, 3] * 4
    assert state.epoch == 8
    assert state.batch == 0
    # Steps are counted across epochs, and from 0 in each fit.
    assert commits == [(4, 2), (5, 0), (5, 1), (6, 0), (6, 2), (7, 0), (7, 1), (8, 0)]


FIT = """
import json, os, signal, sys
import keras, numpy as np
import hvdtrain.keras as hvd

hvd.init()
rank, killed_rank = hvd.rank(), int(sys.argv[1])
keras.utils.set_random_seed(rank)  # elastic.run broadcasts the weights
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size())), "mse")
rng = np.random.default_rng(rank)
x = rng.normal(size=(40, 4)).astype("float32")
y = x @ np.arange(4.0, dtype="float32")[:, None]
fits, resets = [], []


class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if rank == killed_rank and state.epoch == 1 and batch == 3:
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
            Kill(),
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
print("=" + json.dumps([rank, hvd.rank(), fits, resets, state.epoch, rate, loss]), flush=True)
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed_rank", [0, 2])
def test_fit_continues_without_a_lost_rank(elastic, killed_rank):
    done = elastic(FIT, "--chief-only", arguments=[str(killed_rank)])
    assert done.returncode == 0, done
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("="))
    first_rank, rank, fits, resets, epoch, rate, loss = json.loads(line[1:])
    assert (first_rank, rank) == (0 if killed_rank else 1, 0)
    # The first commit after the loss comes after the fifth step, within an epoch.
    assert fits == [[0, 0], [1, 4]]
    assert resets == [2]
    assert epoch == 6
    assert rate == pytest.approx(0.1)
    assert loss < 0.5
