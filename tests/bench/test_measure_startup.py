"""The bare mpirun that starts are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.bench.measure_startup import bare_command
from hvdtrain.launch.starters import Mpirun


@pytest.mark.parametrize("family", ["openmpi4", "openmpi5", "hydra"])
def test_bare_mpirun_has_no_options(family) -> None:
    argv, environ = bare_command(Mpirun(path=Path("/mpi/mpirun"), family=family), 3)
    assert argv == ["/mpi/mpirun", "-np", "3"]
    assert bool(environ) == (family != "hydra")
    # What makes MPI start quickly is the business of those who are compared.
    assert not {"OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_osc"} & environ.keys()
