"""The bare mpirun command of the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.bench.measure_startup import bare_command
from hvdtrain.launch.commands import Mpirun


@pytest.mark.parametrize("family", ["openmpi4", "openmpi5", "hydra"])
def test_bare_mpirun_has_no_options(family) -> None:
    argv, environ = bare_command(Mpirun(path=Path("/mpi/mpirun"), family=family), 3)
    assert argv == ["/mpi/mpirun", "-np", "3"]
    assert bool(environ) == (family != "hydra")
    # Settings that make MPI start faster are not part of it.
    assert not {"OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_osc"} & environ.keys()
