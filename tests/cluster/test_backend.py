"""What combines gradients, and why."""

import pytest

from hvdtrain.cluster.backend import DeviceCapabilities, choose_backend, choose_for_devices
from hvdtrain.cluster.topology import Topology
from hvdtrain.errors import ConfigurationError, LaunchError

GLOO = Topology(rank=1, size=2, local_rank=1, local_size=2, launcher="horovod-gloo")
MPI = Topology(rank=1, size=2, local_rank=1, local_size=2, launcher="openmpi")


@pytest.mark.parametrize(
    ("topology", "asked", "backend", "reason"),
    [
        (MPI, "auto", "mpi", "the ranks can use MPI"),
        (MPI, "mpi", "mpi", "--backend mpi"),
        (MPI, "nccl", "mpi", "the ranks can use MPI"),
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


GPU0, GPU1 = (DeviceCapabilities(gpu=f"GPU-{n}", has_nccl=True, ready=True) for n in "01")
CPU = DeviceCapabilities(gpu="", has_nccl=False, ready=True)
LATE = GPU1._replace(ready=False)
OTHER = GPU1._replace(has_nccl=False)


@pytest.mark.parametrize(
    ("asked", "capabilities", "backend", "reason"),
    [
        ("auto", [GPU0, GPU1], "nccl", "every rank has a GPU"),
        ("auto", [CPU, CPU], "mpi", "no rank has a GPU"),
        ("auto", [GPU0, CPU, CPU], "mpi", "ranks 1, 2 are without a GPU, and others have one"),
        ("auto", [GPU0, GPU0], "mpi", "ranks 0, 1 are sharing a GPU, which NCCL does not allow"),
        ("auto", [GPU0, OTHER], "mpi", "rank 1 is using a TensorFlow without NCCL"),
        (
            *("auto", [GPU0, LATE], "mpi"),
            "rank 1 is late: the program used TensorFlow's devices before hvdtrain.init()",
        ),
        ("mpi", [GPU0, GPU1], "mpi", "--backend mpi"),
        ("nccl", [GPU0, GPU1], "nccl", "--backend nccl"),
        (
            *("nccl", [CPU, CPU], "nccl"),
            "--backend nccl (by TensorFlow's ring on CPUs, as no rank has a GPU)",
        ),
    ],
)
def test_choice_for_devices(asked, capabilities, backend, reason):
    found = choose_for_devices(asked, capabilities, has_servers=False, elastic=False)
    assert found == (backend, reason)


@pytest.mark.parametrize(
    ("capabilities", "reason"),
    [
        ([CPU, GPU1], "rank 0 is without a GPU"),
        ([GPU1, GPU1], "sharing a GPU"),
        ([GPU0, OTHER], "without NCCL"),
        ([CPU, CPU._replace(ready=False)], "rank 1 is late"),
    ],
)
def test_nccl_where_it_can_t_be(capabilities, reason):
    with pytest.raises(LaunchError, match=rf"--backend nccl .* can't be used: .*{reason}"):
        choose_for_devices("nccl", capabilities, has_servers=False, elastic=False)


@pytest.mark.parametrize(
    ("has_servers", "elastic", "reason"),
    [(True, False, "some ranks are parameter servers"), (False, True, "ranks may be lost")],
)
def test_what_devices_can_t_do(has_servers, elastic, reason):
    options = {"has_servers": has_servers, "elastic": elastic}
    assert reason in choose_for_devices("auto", [GPU0, GPU1], **options).reason
    with pytest.raises(ConfigurationError, match=reason):
        choose_for_devices("nccl", [GPU0, GPU1], **options)
