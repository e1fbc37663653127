"""Tests on Grain datasets, which other tests run in an environment with Grain."""

from __future__ import annotations

import grain
import numpy as np
import pytest

from tests.trainer.data.ranks import joint, shard_on_ranks


class Samples(grain.sources.RandomAccessDataSource):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int):
        return np.ones(2), np.array(index)


def _loader(_: int) -> grain.DataLoader:
    operations = [grain.transforms.Batch(batch_size=4)]
    order = grain.samplers.IndexSampler(23, num_epochs=1)
    return grain.DataLoader(data_source=Samples(), sampler=order, operations=operations)


def _dataset(_: int) -> grain.MapDataset:
    return grain.MapDataset.source(Samples()).batch(4)


@pytest.mark.parametrize("make", [_loader, _dataset])
def test_every_batch_is_read_once_in_each_pass(make) -> None:
    shares = shard_on_ranks(2, make)
    expected = [[*range(first, min(first + 8, 23))] for first in (0, 8, 16)]
    assert [joint(shares) for _ in range(2)] == [expected] * 2
