"""Training on every kind of input, compared with one process on the joint batch."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import world as state
from tests.trainer.equivalence import TOLERANCE, alike, check_close, distance, from_chief, weights
from tests.trainer.features import JOINT_BATCH, ROWS, X, Y, classifier, compare
from tests.trainer.own_steps import OwnStep


@pytest.mark.ranks(2)
def test_tf_data(world):
    def train(model: keras.Model, size: int) -> None:
        # Batches are per rank: joint batch k consists of batches kN to kN+N-1.
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)
        model.fit(dataset, epochs=2, verbose=0)

    compare(world, classifier, train)


class Batches(keras.utils.PyDataset):
    def __init__(self, size: int) -> None:
        super().__init__(workers=1)
        self._size = size

    def __len__(self) -> int:
        return -(-ROWS // self._size)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * self._size, (index + 1) * self._size)
        return X[part], Y[part]


@pytest.mark.ranks(2, 3)
def test_py_dataset(world):
    def train(model: keras.Model, size: int) -> None:
        model.fit(Batches(size), epochs=2, shuffle=False, verbose=0)

    compare(world, classifier, train)


class Window(Batches):
    """A dataset whose number of rows changes in ``on_epoch_end``."""

    def __init__(self, size: int, *rows: int) -> None:
        super().__init__(size)
        self.rows, self.later = rows[0], list(rows[1:])

    def __len__(self) -> int:
        return -(-self.rows // self._size)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * self._size, min(self.rows, (index + 1) * self._size))
        return X[part], Y[part]

    def on_epoch_end(self) -> None:
        if self.later:
            self.rows = self.later.pop(0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.ranks(1, 2, 3)
def test_the_length_of_a_py_dataset_may_change(world, tmp_path):
    def train(model: keras.Model, size: int, *callbacks: Any) -> Any:
        data, validation = Window(size, 48, 40, 25, 13, 60), Window(size, 12, 30, 20, 31, 13, 40)

        class Sets(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                data.rows = 60 if epoch == 3 else data.rows

        history = model.fit(
            data, epochs=5, shuffle=False, verbose=0, validation_data=validation,
            callbacks=[Sets(), *callbacks],
        )  # fmt: skip
        return history.history

    alone, together = classifier(), classifier()
    alone.run_eagerly = True  # a traced step without data would advance the optimizer
    expected = train(alone, JOINT_BATCH)
    world.distribute(together)
    # With a Checkpoint, even a single rank doesn't run Keras' own loop.
    history = train(together, JOINT_BATCH // world.size(), world.Checkpoint(tmp_path))
    assert int(together.optimizer.iterations) == 4 + 3 + 2 + 4 + 4
    check_close(history, expected)
    assert alike(together)
    assert distance(together, weights(alone)) <= TOLERANCE


@pytest.mark.ranks(2)
def test_presharded_data(world):
    def train(model: keras.Model, size: int) -> None:
        if size == JOINT_BATCH:
            order = np.r_[0:6, 20:26, 6:12, 26:32, 12:18]
            model.fit(X[order], Y[order], batch_size=12, shuffle=False, verbose=0)
        else:
            part = slice(0, 18) if world.rank() == 0 else slice(20, 32)
            model.fit(X[part], Y[part], batch_size=6, shuffle=False, verbose=0)

    alone = classifier()
    if world.is_chief():
        train(alone, JOINT_BATCH)
    reference = from_chief(weights(alone))
    together = classifier()
    world.distribute(together, presharded=True)
    train(together, 6)
    assert alike(together)
    assert distance(together, reference) <= TOLERANCE


@pytest.mark.ranks(2)
def test_shuffled_epochs_see_every_sample_once_and_differ(world):
    seen: list[list[int]] = []

    class Own(OwnStep):
        def train_step(self, data: Any) -> Any:
            tf.numpy_function(lambda x: seen[-1].extend(x[:, 0].tolist()), [data[0]], [])
            return super().train_step(data)

    class Begin(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append([])

    model = Own()
    model(X[:1])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    world.distribute(model)
    ids = np.arange(ROWS)
    x = np.repeat(ids[:, np.newaxis], 6, axis=1).astype("float32")
    model.fit(x, Y, batch_size=6, epochs=2, verbose=0, callbacks=[Begin()])
    for rank_parts in zip(*state.collectives().allgather_object(seen)):
        assert sorted(np.concatenate(rank_parts)) == ids.tolist()
    assert seen[0] != seen[1]
