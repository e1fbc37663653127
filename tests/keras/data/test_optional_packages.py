from __future__ import annotations

from tests.harness.jobs import REPOSITORY

PROGRAM = """
import keras
import pandas
import scipy.sparse

from tests.keras.data.ranks import read, shard_on_ranks
from tests.keras.data.test_arrays import check_kind
from tests.keras.data.test_pydataset import Batches


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


def test_data_of_pandas_and_scipy(environment, run_command):
    """As arrays, and SciPy's as what a PyDataset returns."""
    python = environment("optional")
    done = run_command([python, "-c", PROGRAM], env={"PYTHONPATH": str(REPOSITORY)}, timeout_s=120)
    assert (done.returncode, done.stdout) == (0, "3 sparse batches\n")
