"""From a plan to argv and environment: exactly, and without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.commands import Command, Family, LocalPlan, Mpirun, local_command, recognise

OPENMPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
OPENMPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"


@pytest.mark.parametrize(
    ("text", "family"),
    [(OPENMPI_4, "openmpi4"), (OPENMPI_5, "openmpi5"), (MPICH, "hydra"), (INTEL, "hydra")],
)
def test_recognise(text: str, family: Family) -> None:
    path = Path("/opt/mpi/bin/mpirun")
    assert recognise(path, text) == Mpirun(path=path, family=family)


@pytest.mark.parametrize("text", ["", "mpirun (Open MPI) 3.1.6\n", "mpiexec: unknown option\n"])
def test_what_is_not_recognised_is_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match=r"/opt/mpi/bin/mpirun --version printed .*pip install"):
        recognise(Path("/opt/mpi/bin/mpirun"), text)


def command(family: Family, *, ranks: int = 2, cores: int = 8, root: bool = False, **environ: str):
    mpirun = Mpirun(path=Path("/mpi/bin/mpirun"), family=family)
    plan = LocalPlan(ranks=ranks, cores=cores, program=("python", "train.py", "--lr", "0.1 "))
    return local_command(plan, mpirun, environ, python_folder=Path("/venv/bin"), as_root=root)


def test_openmpi_5() -> None:
    assert command("openmpi5", PATH="/usr/bin:/bin", HOME="/home/me") == Command(
        argv=(
            *("/mpi/bin/mpirun", "-np", "2"),
            *("--prtemca", "ras", "^slurm,tm,pbs,lsf,gridengine"),
            *("--prtemca", "plm", "^slurm,tm,lsf"),
            *("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
            *("python", "train.py", "--lr", "0.1 "),
        ),
        environ={
            "HOME": "/home/me",
            "OMPI_MCA_btl": "self,vader,tcp",
            "OMPI_MCA_osc": "^ucx",
            "OMPI_MCA_pml": "ob1",
            "OMP_NUM_THREADS": "4",
            "PATH": "/venv/bin:/mpi/bin:/usr/bin:/bin",
            "TF_NUM_INTRAOP_THREADS": "4",
        },
    )


def test_openmpi_4_names_the_same_components_otherwise() -> None:
    assert command("openmpi4").argv[3:9] == (
        *("--mca", "ras", "^slurm,tm,pbs,lsf,gridengine"),
        *("--mca", "plm", "^slurm,tm,lsf"),
    )
    assert command("openmpi4").environ == command("openmpi5").environ


def test_hydra() -> None:
    hydra = command("hydra", PATH="/usr/bin")
    assert hydra.argv == (
        *("/mpi/bin/mpirun", "-np", "2", "-rmk", "user", "-launcher", "fork"),
        *("-hosts", "localhost", "python", "train.py", "--lr", "0.1 "),
    )
    assert not [name for name in hydra.environ if name.startswith("OMPI")]


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(1, 8, "8"), (3, 8, "2"), (8, 8, "1"), (9, 8, "1")]
)
def test_ranks_share_the_cores(ranks: int, cores: int, threads: str) -> None:
    environ = command("openmpi5", ranks=ranks, cores=cores).environ
    assert environ["TF_NUM_INTRAOP_THREADS"] == environ["OMP_NUM_THREADS"] == threads
    yields = environ.get("OMPI_MCA_mpi_yield_when_idle")
    assert yields == ("1" if ranks > cores else None), "busy ranks would starve the others"


def test_the_users_own_settings_stay() -> None:
    mine = {
        "OMPI_MCA_btl": "self,ofi",
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_osc": "",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "OMP_NUM_THREADS": "3",
        "TF_NUM_INTRAOP_THREADS": "5",
        "OMPI_ALLOW_RUN_AS_ROOT": "0",
    }
    environ = command("openmpi5", ranks=16, root=True, **mine).environ
    assert {name: environ[name] for name in mine} == mine


def test_root_is_allowed_where_it_is_root() -> None:
    assert command("openmpi5", root=True).environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in command("openmpi5").environ


def test_path_names_no_folder_twice() -> None:
    environ = command("openmpi5", PATH="/usr/bin::/venv/bin:/usr/bin").environ
    assert environ["PATH"] == "/venv/bin:/mpi/bin:/usr/bin"
