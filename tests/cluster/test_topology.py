from __future__ import annotations

import json

import pytest

from hvdtrain.cluster.topology import Topology, read_topology
from hvdtrain.errors import LaunchError
from tests.cluster import environments as env


def place(
    rank: int, size: int, local: tuple[int, int], node_rank: int | None, launcher: str
) -> Topology:
    return Topology(
        rank=rank,
        size=size,
        local_rank=local[0],
        local_size=local[1],
        node_rank=node_rank,
        launcher=launcher,  # type: ignore[arg-type]
    )


ALONE = Topology()

LAUNCHERS = {
    "nothing": ({}, ALONE),
    "openmpi5": (env.OPENMPI_5, place(1, 2, (1, 2), 0, "openmpi")),
    "openmpi5-hosts": (env.OPENMPI_5_TWO_HOSTS, place(2, 3, (1, 2), None, "openmpi")),
    "openmpi4-hosts": (env.OPENMPI_4_TWO_HOSTS, place(2, 3, (1, 2), None, "openmpi")),
    "horovodrun-mpi": (env.HOROVODRUN_MPI, place(1, 2, (1, 2), 0, "openmpi")),
    "mpich5": (env.MPICH_5, place(1, 2, (1, 2), 0, "hydra")),
    "mpich4-hosts": (env.MPICH_4_TWO_HOSTS, place(2, 3, (1, 2), None, "hydra")),
    "impi": (env.INTEL_MPI, place(1, 2, (1, 2), 0, "hydra")),
    "impi-hosts": (env.INTEL_MPI_TWO_HOSTS, place(2, 3, (0, 1), None, "hydra")),
    "srun-pmix": (env.SRUN_PMIX, place(2, 3, (0, 1), 1, "slurm")),
    "srun-pmi2": (env.SRUN_PMI2, place(1, 4, (1, 3), 0, "slurm")),
    "sbatch-script": (env.SBATCH_SCRIPT, ALONE),
    "sbatch-script-from-a-step": (env.SBATCH_SCRIPT_FROM_A_STEP, ALONE),
    "salloc-shell": (env.SALLOC_SHELL, ALONE),
    "salloc-interactive-step": (env.SALLOC_INTERACTIVE_STEP, place(0, 1, (0, 1), 0, "slurm")),
}


@pytest.mark.parametrize(("environ", "expected"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_read_topology(environ: dict[str, str], expected: Topology) -> None:
    assert read_topology(environ) == expected


SLURM_AROUND = [
    env.SBATCH_SCRIPT,
    env.SALLOC_SHELL,
    env.SALLOC_INTERACTIVE_STEP,
    env.SRUN_PMIX,  # mpirun starts its daemons with srun
    env.SRUN_PMI2,
]
MPIRUNS = ["openmpi5", "openmpi5-hosts", "openmpi4-hosts", "mpich5", "impi", "impi-hosts"]


@pytest.mark.parametrize("around", SLURM_AROUND)
@pytest.mark.parametrize("name", MPIRUNS)
def test_mpirun_takes_precedence_over_slurm(name: str, around: dict[str, str]) -> None:
    environ, expected = LAUNCHERS[name]
    assert read_topology({**around, **environ}) == expected


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


INVALID = {
    "rank-too-big": ({**env.OPENMPI_5, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2"),
    "negative": ({**env.MPICH_5, "PMI_RANK": "-1"}, "PMI_RANK=-1"),
    "size-zero": ({**env.MPICH_5, "PMI_SIZE": "0"}, "PMI_SIZE=0"),
    "local-rank-too-big": ({**env.INTEL_MPI, "MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2"),
    "local-size-too-big": ({**env.OPENMPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "_SIZE=3"),
    "not-a-number": (
        {**env.OPENMPI_5, "OMPI_COMM_WORLD_RANK": "one"},
        "OMPI_COMM_WORLD_RANK='one'",
    ),
    "empty": ({**env.OPENMPI_5, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE=''"),
    "size-missing": (without(env.OPENMPI_5, "OMPI_COMM_WORLD_SIZE"), "SIZE is missing"),
    "rank-missing": (without(env.OPENMPI_5, "OMPI_COMM_WORLD_RANK"), "RANK is missing"),
    "local-missing": (without(env.MPICH_5, "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS is missing"),
    "slurm-rank": ({**env.SRUN_PMIX, "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2"),
    "slurm-counts": ({**env.SRUN_PMIX, "SLURM_STEP_TASKS_PER_NODE": "2;1"}, "'2;1'"),
    "slurm-localid": (without(env.SRUN_PMIX, "SLURM_LOCALID"), "SLURM_LOCALID is missing"),
    "pmi-alone": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_SIZE='2'"),
    "horovod-number": ({**env.HOROVODRUN_GLOO, "HOROVOD_SIZE": "x"}, "HOROVOD_SIZE='x'"),
}


@pytest.mark.parametrize(("environ", "problem"), INVALID.values(), ids=INVALID)
def test_invalid_variables_are_an_error(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(LaunchError) as raised:
        read_topology(environ)
    assert problem in str(raised.value)
    assert "unset" in str(raised.value)


def test_horovodrun_gloo_of_one_rank() -> None:
    one = {**env.HOROVODRUN_GLOO, "HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"}
    one |= {"HOROVOD_LOCAL_SIZE": "1", "HOROVOD_LOCAL_RANK": "0"}
    assert read_topology(one) == place(0, 1, (0, 1), 0, "horovod-gloo")


@pytest.mark.mpi
def test_the_installed_mpirun(launch) -> None:
    done = launch(
        3,
        """
        import dataclasses, json, os
        from hvdtrain.cluster.topology import read_topology
        print(json.dumps(dataclasses.asdict(read_topology(os.environ))), flush=True)
        """,
    )
    assert done.returncode == 0, done
    places = [json.loads(line) for line in done.stdout.splitlines()]
    places.sort(key=lambda place: place["rank"])
    assert [(p["rank"], p["size"]) for p in places] == [(0, 3), (1, 3), (2, 3)]
    assert [(p["local_rank"], p["local_size"]) for p in places] == [(0, 3), (1, 3), (2, 3)]
    assert {p["node_rank"] for p in places} == {0}
