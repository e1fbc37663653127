from __future__ import annotations

import os
import threading
import time

import keras
import numpy as np
import pytest

from hvdtrain.errors import DataError
from tests.trainer.data.ranks import flat, joint, on_ranks, read, shard, shard_on_ranks


class Batches(keras.utils.PyDataset):
    """Rows 0 to ``rows - 1`` in batches."""

    def __init__(self, rows: int, batch_size: int = 2, **options) -> None:
        super().__init__(**options)
        self.order = np.arange(rows)
        self.batch_size = batch_size
        self.calls: list[str] = []

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __getitem__(self, index: int):
        ids = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return ids[:, None].astype("float32"), ids

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")


WORKERS = [
    pytest.param({}, id="in-line"),
    pytest.param({"workers": 3}, id="threads"),
    pytest.param({"workers": 3, "max_queue_size": 1}, id="short-queue"),
    pytest.param(
        {"workers": 2, "use_multiprocessing": True}, id="processes", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("size", [1, 3])
def test_every_batch_is_read_once_in_order(options, size: int) -> None:
    for rows in (1, 11):
        shares = shard_on_ranks(size, lambda _, rows=rows: Batches(rows, **options))
        for _ in range(2):
            steps = joint(shares)
            assert flat(steps) == list(range(rows))
            assert [len(step) for step in steps[:-1]] == [2 * size] * (len(steps) - 1)


class Reusing(Batches):
    def __getitem__(self, index: int):
        x, y = super().__getitem__(index)
        self.memory = getattr(self, "memory", (np.zeros_like(x), np.zeros_like(y)))
        for own, new in zip(self.memory, (x, y)):
            own[:] = new
        return self.memory


def test_batches_may_reuse_their_memory() -> None:
    shares = shard_on_ranks(2, lambda _: Reusing(12))
    assert flat(joint(shares)) == list(range(12))


def test_each_rank_reads_only_its_own_batches() -> None:
    requested: dict[int, list[int]] = {0: [], 1: []}

    class Counting(Batches):
        def __init__(self, rank: int) -> None:
            super().__init__(16)
            self.rank = rank

        def __getitem__(self, index: int):
            requested[self.rank].append(index)
            return super().__getitem__(index)

    shares = shard_on_ranks(2, Counting)
    for indices in requested.values():
        indices.clear()
    joint(shares)
    assert requested == {0: [0, 2, 4, 6], 1: [1, 3, 5, 7]}


def test_ranks_shuffle_batches_in_the_same_order() -> None:
    shares = shard_on_ranks(2, lambda _: Batches(22), shuffle=True)
    orders = []
    for epoch in (0, 1):
        on_ranks(2, lambda engine, epoch=epoch: shares[engine.rank].on_epoch_begin(epoch))
        orders.append(flat(joint(shares)))
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(22))
    assert len({tuple(order) for order in orders} | {tuple(range(22))}) == 3


@pytest.mark.parametrize("options", WORKERS)
def test_an_error_in_the_users_code_reaches_the_loop(options) -> None:
    class Failing(Batches):
        def __getitem__(self, index: int):
            if index == 4:
                raise RuntimeError("disk on fire")
            return super().__getitem__(index)

    share = shard_on_ranks(1, lambda _: Failing(20, **options))[0]
    with pytest.raises(Exception, match="disk on fire"):
        read(share)


def test_a_killed_worker_process_is_an_error() -> None:
    class Dying(Batches):
        def __getitem__(self, index: int):
            if index == 4:
                os._exit(1)
            return super().__getitem__(index)

    share = shard_on_ranks(1, lambda _: Dying(20, workers=2, use_multiprocessing=True))[0]
    with pytest.raises(Exception, match="process"):
        read(share)


def test_an_abandoned_pass_ends_its_workers() -> None:
    share = shard_on_ranks(1, lambda _: Batches(2000, workers=3))[0]
    before = threading.active_count()
    iterator = iter(share.dataset)
    next(iterator)
    del iterator
    deadline = time.monotonic() + 20
    while threading.active_count() > before + 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before + 3
    assert sum(step.rows for step in read(share)) == 2000


def test_an_endless_dataset_needs_steps() -> None:
    class Endless(Batches):
        @property
        def num_batches(self):
            return None

        def __getitem__(self, index: int):
            return np.full((2, 1), index), np.array([2 * index, 2 * index + 1])

    with pytest.raises(DataError, match="steps_per_epoch"):
        shard_on_ranks(2, lambda _: Endless(1))
    shares = shard_on_ranks(2, lambda _: Endless(1, workers=2), steps=3)
    assert [share.steps for share in shares] == [None, None]
    assert [step.ids for step in read(shares[1], limit=3)] == [[2, 3], [6, 7], [10, 11]]


@pytest.mark.parametrize("batch", [(np.ones(2),) * 4, "text"])
def test_an_unsupported_batch_is_an_error(batch) -> None:
    class Unsupported(Batches):
        def __getitem__(self, index: int):
            return batch

    with pytest.raises(ValueError, match="__getitem__"):
        shard_on_ranks(1, lambda _: Unsupported(2))


def test_a_batch_with_none() -> None:
    class WithNone(Batches):
        def __getitem__(self, index: int):
            x, y = super().__getitem__(index)
            return {"a": x, "b": None}, y

    steps = read(shard_on_ranks(2, lambda _: WithNone(5))[1])
    assert [(step.ids, step.batch[0]["b"]) for step in steps] == [([2, 3], None), ([], None)]


def test_class_weights() -> None:
    share = shard_on_ranks(1, lambda _: Batches(4), class_weight={0: 2.0, 3: 0.5})[0]
    weights = [np.asarray(element[0][2]).tolist() for element in share.dataset]
    assert weights == [[2.0, 1.0], [1.0, 0.5]]


def test_an_empty_dataset_is_an_error() -> None:
    with pytest.raises(DataError, match="length 0"):
        shard_on_ranks(1, lambda _: Batches(0))


def test_a_different_order_on_one_rank_is_an_error() -> None:
    class Shuffled(Batches):
        def __init__(self, seed: int) -> None:
            super().__init__(100, 10)
            self.order = np.random.default_rng(seed).permutation(100)

    shard_on_ranks(2, lambda _: Shuffled(1))
    with pytest.raises(DataError, match=r"content of the first batch.*set_random_seed"):
        shard_on_ranks(2, Shuffled)


class Reshuffled(Batches):
    """Draws a new order after each epoch, as many datasets do."""

    def __init__(self, random: np.random.Generator) -> None:
        super().__init__(60, 6)
        self.random = random

    def on_epoch_end(self) -> None:
        self.random.shuffle(self.order)


def _two_epochs(make, **options):
    def run(engine):
        share = shard(engine, make(engine.rank), **options)
        ids = []
        for epoch in range(2):
            share.on_epoch_begin(epoch)
            ids += [step.ids for step in read(share)]
            share.on_epoch_end()
        return ids

    return on_ranks(2, run)


def test_ranks_may_reshuffle_in_the_same_order() -> None:
    ranks = _two_epochs(lambda _: Reshuffled(np.random.default_rng(5)))
    for epoch in (slice(0, 5), slice(5, 10)):
        assert sorted(flat(flat(ids[epoch] for ids in ranks))) == list(range(60))


def test_reshuffling_in_different_orders_is_an_error() -> None:
    for result in _two_epochs(lambda rank: Reshuffled(np.random.default_rng(rank))):
        with pytest.raises(DataError, match="first batch in epoch 0"):
            raise result


def test_the_users_hooks_are_called_as_in_keras() -> None:
    alone = Batches(8)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(Batches(2), verbose=0)  # torch and JAX read a batch to build the metrics
    model.fit(alone, epochs=2, verbose=0)
    datasets = [Batches(8), Batches(8)]
    results = _two_epochs(lambda rank: datasets[rank], trains=True)
    assert not any(isinstance(result, Exception) for result in results)
    assert [dataset.calls for dataset in datasets] == [alone.calls] * 2
    datasets = [Batches(8), Batches(8)]
    _two_epochs(lambda rank: datasets[rank])
    assert [dataset.calls for dataset in datasets] == [["end", "begin", "end"] * 2] * 2


class Changing(Batches):
    """Has a different number of rows in each epoch. The ids of rank 1 start at 100."""

    def __init__(self, rank: int, *rows: int, **options) -> None:
        super().__init__(rows[0], **options)
        self.rank, self.rows = rank, iter(rows)

    def on_epoch_begin(self) -> None:
        self.order = np.arange(next(self.rows)) + 100 * self.rank


@pytest.mark.parametrize("options", WORKERS)
def test_the_length_may_change_in_each_epoch(options) -> None:
    first, second = _two_epochs(lambda _: Changing(0, 12, 5, **options), trains=True)
    assert first == [[0, 1], [4, 5], [8, 9], [0, 1], [4]]
    assert second == [[2, 3], [6, 7], [10, 11], [2, 3], []]
    ranks = _two_epochs(lambda _: Changing(0, 17, 6, **options), trains=True, shuffle=True)
    assert sorted(flat(flat(ids[:5] for ids in ranks))) == list(range(17))
    assert sorted(flat(flat(ids[5:] for ids in ranks))) == list(range(6))


def test_later_epochs_are_not_longer_than_the_first() -> None:
    first, second = _two_epochs(lambda _: Changing(0, 6, 17), trains=True)
    assert first == [[0, 1], [4, 5], [0, 1], [4, 5]]
    assert second == [[2, 3], [], [2, 3], [6, 7]]


def test_presharded_ranks_agree_on_the_most_steps_in_each_epoch() -> None:
    rows = [(11, 4), (2, 9)]
    ranks = _two_epochs(lambda r: Changing(r, *rows[r]), trains=True, presharded=True)
    assert [len(ids) for ids in ranks] == [6 + 2] * 2
    for rank, (first, second) in enumerate(rows):
        assert flat(ranks[rank][:6]) == [100 * rank + i for i in range(first)]
        assert flat(ranks[rank][6:]) == [100 * rank + i for i in range(min(second, 4 - 2 * rank))]


def test_a_different_length_on_one_rank_is_an_error() -> None:
    for result in _two_epochs(lambda rank: Changing(0, 12, 8 + 4 * rank), trains=True):
        with pytest.raises(DataError, match="number of batches is 4 on rank 0, 6 on rank 1"):
            raise result


def test_the_length_must_not_change_in_a_pass_over_several_epochs() -> None:
    for result in _two_epochs(lambda _: Changing(0, 20, 8), trains=True, steps=1):
        with pytest.raises(DataError, match="got 4 batches in epoch 1 and 10 before"):
            raise result
