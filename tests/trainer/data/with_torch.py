"""Tests on torch's ``DataLoader``, which other tests run in an environment with torch."""

from __future__ import annotations

import keras
import numpy as np
import torch

from tests.trainer.data.ranks import flat, joint, read, shard_on_ranks


def _loader(_: int) -> torch.utils.data.DataLoader:
    data = torch.utils.data.TensorDataset(torch.ones(23, 2), torch.arange(23))
    order = torch.Generator().manual_seed(1)
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=order)


def test_a_loader_resumes_in_the_order_of_its_second_pass() -> None:
    shares = shard_on_ranks(2, _loader)
    passes = [joint(shares) for _ in range(2)]
    assert shares[0].steps == 3
    assert [len(step) for step in passes[0]] == [8, 8, 7]
    assert passes[0] != passes[1]
    assert sorted(flat(passes[1])) == [*range(23)]
    resumed = shard_on_ranks(2, _loader)
    for share in resumed:
        share.catch_up(epochs=1, passes=1)
    assert joint(resumed) == passes[1]


def test_a_loader_is_not_left_open() -> None:
    closed = []

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            try:
                yield from ((torch.ones(2), torch.tensor(number)) for number in range(23))
            finally:
                closed.append(True)

    shares = shard_on_ranks(1, lambda _: torch.utils.data.DataLoader(Stream(), batch_size=4))
    assert closed == [True], "after its first batches were examined"
    assert flat(joint(shares)) == [*range(23)]


def test_tensors_that_numpy_cant_read() -> None:
    def generator(_: int):
        for number in range(4):
            x = torch.full((2, 1), number, dtype=torch.bfloat16, requires_grad=True)
            yield x, torch.full((2,), number)

    steps = read(shard_on_ranks(2, generator)[1])
    for step, number in zip(steps, [1, 3], strict=True):
        assert keras.backend.standardize_dtype(step.batch[0].dtype) == "bfloat16"
        assert float(step.batch[0][0, 0]) == number


def test_tensors_as_arrays() -> None:
    ids = torch.arange(10)
    shares = shard_on_ranks(2, lambda _: (ids[:, None].float(), ids), batch_size=2, shuffle=True)
    for share in shares:
        for step in read(share):
            x, y = map(keras.ops.convert_to_numpy, step.batch)
            np.testing.assert_array_equal(x[:, 0], y)
    assert sorted(flat(joint(shares))) == [*range(10)]
