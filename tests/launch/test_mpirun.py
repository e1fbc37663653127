"""Which MPI an mpirun is of, and what it can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.mpirun import Family, Mpirun, recognise, why_not_start_elastic

OPENMPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
OPENMPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"


@pytest.mark.parametrize(
    ("text", "family", "name"),
    [
        (OPENMPI_4, "openmpi4", "Open MPI 4.1.4"),
        (OPENMPI_5, "openmpi5", "Open MPI 5.0.11"),
        (MPICH, "hydra", "MPICH 5.0.2"),
        (INTEL, "hydra", "Intel MPI 2021.18.1"),
    ],
)
def test_recognise(text: str, family: Family, name: str) -> None:
    path = Path("/opt/mpi/bin/mpirun")
    found = recognise(path, text)
    assert found == Mpirun(path=path, family=family)
    assert found.name == name


@pytest.mark.parametrize("text", ["", "mpirun (Open MPI) 3.1.6\n", "mpiexec: unknown option\n"])
def test_what_is_not_recognised_is_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match=r"/opt/mpi/bin/mpirun --version printed .*pip install"):
        recognise(Path("/opt/mpi/bin/mpirun"), text)


def test_where_ranks_go_on_without_one() -> None:
    five = Mpirun(path=Path("/opt/bin/mpirun"), family="openmpi5")
    four = Mpirun(path=Path("/opt/bin/mpirun"), family="openmpi4")
    assert why_not_start_elastic(five) == ""
    assert "srun" in why_not_start_elastic(None)
    assert "/opt/bin/mpirun is another MPI" in why_not_start_elastic(four)
