"""Training with synchronous steps, compared with one process on the joint batch."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.harness.jobs import clean_environment, run_job
from tests.trainer.served import oracle
from tests.trainer.served.programs import servers

PROGRAM = Path(oracle.__file__)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, fork_servers):
    """Return a folder with the results of plain Keras on joint batches."""
    folder = tmp_path_factory.mktemp("alone")
    command = [*fork_servers.python(), os.fspath(PROGRAM), os.fspath(folder)]
    done = run_job(command, folder=folder, timeout_s=200, environment=clean_environment())
    assert done.returncode == 0, done
    return folder


# Several servers could differ from one in steps, norms, sparse gradients and averages.
SPREAD = ["accumulation, uneven", "clipnorm", "embedding", "averages"]
# The order of messages could matter for these.
BOUND = ["embedding", "averages", "clipnorm", "schedule, uneven", "own_step"]
# All other cases, and a custom train_step in each mode.
OTHERS = [case for case in oracle.CASES if case == "own_step" or case not in SPREAD + BOUND]


@pytest.mark.parametrize(
    ("ranks", "environment", "cases"),
    [
        pytest.param(3, servers("sync-ps"), OTHERS, id="sync-ps"),
        pytest.param(4, servers("sync-ps", 2), SPREAD, id="sync-ps, 2 servers"),
        pytest.param(4, servers("async-ps", 2, staleness_bound=0), BOUND, id="bound 0, 2 servers"),
    ],
)
def test_training_equals_one_process(launch, tmp_path, alone, ranks, environment, cases):
    done = launch(ranks, PROGRAM, str(tmp_path), *cases, timeout_s=200, env=environment)
    assert done.returncode == 0
    for case in cases:
        assert done.stdout.count(f"{case}: rank ") == ranks
        with np.load(alone / f"{case}.npz") as expected, np.load(tmp_path / f"{case}.npz") as got:
            assert got.files == expected.files
            for name in expected.files:
                scale = np.abs(expected[name]).max()
                allowed = 1e-10 * scale
                error = np.abs(got[name] - expected[name]).max()
                assert error <= allowed, f"{case}: variable {name} is off by {error:.1e}"
    assert " differs from " not in done.stdout
