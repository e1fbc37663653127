"""Tests on SciPy's sparse data, which other tests run in an environment with SciPy."""

from __future__ import annotations

import keras
import numpy as np
import scipy.sparse

from tests.trainer.data.ranks import read, shard_on_ranks
from tests.trainer.data.test_arrays import check_kind
from tests.trainer.data.test_pydataset import Batches


class Sparse(Batches):
    def __getitem__(self, index: int):
        x, y = super().__getitem__(index)
        return scipy.sparse.csr_matrix(x), y


def test_sparse_arrays() -> None:
    check_kind(scipy.sparse.csr_matrix)


def test_sparse_batches() -> None:
    steps = read(shard_on_ranks(1, lambda _: Sparse(5))[0])
    assert len(steps) == 3
    for step in steps:
        dense = keras.ops.convert_to_tensor(step.batch[0], sparse=False)
        assert np.asarray(dense)[:, 0].tolist() == step.ids
