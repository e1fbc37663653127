"""What combines gradients, and why."""

import pytest

from hvdtrain.cluster.backend import choose_backend
from hvdtrain.cluster.topology import Topology
from hvdtrain.errors import ConfigurationError, LaunchError

GLOO = Topology(rank=1, size=2, local_rank=1, local_size=2, launcher="horovod-gloo")
MPI = Topology(rank=1, size=2, local_rank=1, local_size=2, launcher="openmpi")


@pytest.mark.parametrize(
    ("topology", "asked", "backend", "reason"),
    [
        (MPI, "auto", "mpi", "the ranks can use MPI"),
        (MPI, "mpi", "mpi", "--backend mpi"),
        (MPI, "horovod", "horovod", "--backend horovod"),
        (GLOO, "auto", "horovod", "horovodrun --gloo started the ranks, without MPI"),
        (GLOO, "horovod", "horovod", "--backend horovod"),
        (Topology(launcher="horovod-gloo"), "auto", "mpi", "the ranks can use MPI"),
        (Topology(), "mpi", "mpi", "--backend mpi"),
    ],
)
def test_choice(topology, asked, backend, reason):
    assert choose_backend(topology, asked) == (backend, reason)


def test_mpi_where_there_is_none():
    with pytest.raises(LaunchError, match=r"rank 1 of 2 .* without MPI.*hvdtrain run -np 2"):
        choose_backend(GLOO, "mpi")


@pytest.mark.parametrize(("topology", "asked"), [(GLOO, "auto"), (MPI, "horovod")])
def test_parameter_servers_need_mpi(topology, asked):
    with pytest.raises(ConfigurationError, match="Parameter servers need MPI"):
        choose_backend(topology, asked, has_servers=True)
    assert choose_backend(MPI, "auto", has_servers=True).backend == "mpi"
