from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.keras.data.partition import epoch_order, joint_steps, rank_share

SIZES = (1, 2, 3, 4)
BATCHES = (1, 2, 3, 8)
ROWS = tuple(range(1, 40))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_joint_step_is_the_batch_of_one_process(size: int, batch_size: int, shuffle) -> None:
    joint_batch = size * batch_size
    for rows in ROWS:
        order = epoch_order(rows, shuffle=shuffle, joint_batch=joint_batch, seed=3, epoch=1)
        shares = [
            rank_share(order, batch_size=batch_size, rank=rank, size=size) for rank in range(size)
        ]
        whole = np.stack([share.whole for share in shares], axis=1).reshape(-1, joint_batch)
        last = np.concatenate([share.last[: share.last_rows] for share in shares])
        np.testing.assert_array_equal(np.concatenate([whole.reshape(-1), last]), order)
        assert len(whole) + bool(len(last)) == joint_steps(rows, batch_size, size)
        for share in shares:
            assert share.last_joint_rows == len(last) == rows % joint_batch
            assert share.last_rows <= batch_size
            # Something to compute with, wherever there is a step to take part in.
            assert len(share.last) == max(share.last_rows, min(1, len(last)))


def test_order_is_numpys_permutation_of_seed_and_epoch() -> None:
    order = epoch_order(50, shuffle=True, joint_batch=8, seed=5, epoch=2)
    np.testing.assert_array_equal(order, np.random.default_rng([5, 2]).permutation(50))


def test_order_changes_with_epoch_and_seed() -> None:
    orders = {
        tuple(epoch_order(30, shuffle=True, joint_batch=4, seed=seed, epoch=epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert all(sorted(order) == list(range(30)) for order in orders)


def test_shuffling_batches_keeps_each_sample_in_its_joint_batch() -> None:
    order = epoch_order(30, shuffle="batch", joint_batch=8, seed=1, epoch=0)
    assert order.tolist() != list(range(30))
    for start in range(0, 30, 8):
        assert sorted(order[start : start + 8]) == list(range(start, min(start + 8, 30)))
