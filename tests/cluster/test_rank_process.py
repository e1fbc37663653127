from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hvdtrain.cluster.rank_process import claim_rank, find_rank_process
from tests.cluster import environments

LAUNCHERS = {
    "openmpi": environments.OPENMPI_5,
    "hydra": environments.MPICH_5,
    "slurm": environments.SRUN_PMIX,
    "horovod": environments.HOROVODRUN_GLOO,
}
PROGRAM = (
    "import os; from hvdtrain.cluster.rank_process import find_rank_process as f;"
    "print(f(os.environ))"
)


@pytest.mark.parametrize("environ", LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_child_finds_the_rank_process(environ: dict[str, str]) -> None:
    environ = dict(environ)
    assert find_rank_process(environ) is None
    claim_rank(environ)
    # The rank itself may call init() again.
    assert find_rank_process(environ) is None
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == os.getpid(), done.stderr


OTHER_JOBS = {
    "mpirun": environments.OPENMPI_5 | {"PMIX_NAMESPACE": "prterun-vm-9999@1"},
    "step": environments.SRUN_PMIX | {"SLURM_STEP_ID": "7"},
    "other-mpi": environments.MPICH_5,
}


@pytest.mark.parametrize("environ", OTHER_JOBS.values(), ids=OTHER_JOBS)
def test_a_rank_of_another_job_is_not_a_child(environ: dict[str, str]) -> None:
    # A rank may start another job, whose ranks inherit its environment.
    parent = {**environments.OPENMPI_5, **environments.SRUN_PMIX}
    claim_rank(parent)
    claim = parent["HVDTRAIN_RANK_PROCESS"].partition(" ")[2]
    parent["HVDTRAIN_RANK_PROCESS"] = f"1 {claim}"  # not this process
    assert find_rank_process(parent) == 1
    assert find_rank_process(parent | environ) is None
