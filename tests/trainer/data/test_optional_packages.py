from __future__ import annotations

import pytest

from tests.harness.jobs import REPOSITORY

PANDAS_AND_SCIPY = """
import keras
import pandas
import scipy.sparse

from tests.trainer.data.ranks import read, shard_on_ranks
from tests.trainer.data.test_arrays import check_kind
from tests.trainer.data.test_pydataset import Batches


class Sparse(Batches):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return scipy.sparse.csr_matrix(x), y


check_kind(pandas.DataFrame)
check_kind(scipy.sparse.csr_matrix)
steps = read(shard_on_ranks(1, lambda _: Sparse(5))[0])
for step in steps:
    dense = keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(step.batch[0], sparse=False))
    assert dense[:, 0].tolist() == step.ids
print(f"{len(steps)} sparse batches")
"""

# Each rank has two loaders. One of them resumes in the second pass of the other.
TORCH = """
import torch

from tests.trainer.data.ranks import flat, joint, shard_on_ranks


def loader(_):
    data = torch.utils.data.TensorDataset(torch.ones(23, 2), torch.arange(23))
    order = torch.Generator().manual_seed(1)
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=order)


shares = shard_on_ranks(2, loader)
passes = [joint(shares) for _ in range(2)]
assert shares[0].steps == 3 and [len(step) for step in passes[0]] == [8, 8, 7]
assert passes[0] != passes[1] and sorted(flat(passes[1])) == [*range(23)]
resumed = shard_on_ranks(2, loader)
for share in resumed:
    share.catch_up(epochs=1, passes=1)
assert joint(resumed) == passes[1]
print("alike")
"""

GRAIN = """
import grain
import numpy as np

from tests.trainer.data.ranks import joint, shard_on_ranks


class Samples(grain.sources.RandomAccessDataSource):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return np.ones(2), np.array(index)


def loader(_):
    operations = [grain.transforms.Batch(batch_size=4)]
    order = grain.samplers.IndexSampler(23, num_epochs=1)
    return grain.DataLoader(data_source=Samples(), sampler=order, operations=operations)


expected = [[*range(first, min(first + 8, 23))] for first in (0, 8, 16)]
for make in (loader, lambda _: grain.MapDataset.source(Samples()).batch(4)):
    shares = shard_on_ranks(2, make)
    assert [joint(shares) for _ in range(2)] == [expected] * 2
print("alike")
"""


@pytest.mark.parametrize(
    ("name", "program", "printed"),
    [
        ("optional", PANDAS_AND_SCIPY, "3 sparse batches\n"),
        ("optional", GRAIN, "alike\n"),
        ("torch", TORCH, "alike\n"),
    ],
)
def test_data_of_other_packages(environment, run_command, name, program, printed):
    python = environment(name)
    done = run_command([python, "-c", program], env={"PYTHONPATH": str(REPOSITORY)}, timeout_s=120)
    assert (done.returncode, done.stdout) == (0, printed), done
