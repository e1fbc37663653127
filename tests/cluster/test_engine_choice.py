import pytest

from hvdtrain.cluster.engine_choice import (
    DeviceCapabilities,
    choose_device_engine,
    choose_engine,
    without_nccl,
)
from hvdtrain.cluster.gpus import Gpu
from hvdtrain.cluster.topology import Topology
from hvdtrain.errors import ConfigurationError, LaunchError

GLOO = Topology(rank=1, size=2, local_rank=1, local_size=2, launcher="horovod-gloo")
MPI = Topology(rank=1, size=2, local_rank=1, local_size=2, launcher="openmpi")


@pytest.mark.parametrize(
    ("topology", "backend", "engine", "reason"),
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
def test_engine_by_launcher_and_backend(topology, backend, engine, reason):
    assert choose_engine(topology, backend)[:2] == (engine, reason)


def test_backend_mpi_without_mpi_is_an_error():
    with pytest.raises(LaunchError, match=r"rank 1 of 2 .* without MPI.*hvdtrain run -np 2"):
        choose_engine(GLOO, "mpi")


@pytest.mark.parametrize(("topology", "backend"), [(GLOO, "auto"), (MPI, "horovod")])
def test_parameter_servers_need_mpi(topology, backend):
    with pytest.raises(ConfigurationError, match="Parameter servers need MPI"):
        choose_engine(topology, backend, has_servers=True)
    assert choose_engine(MPI, "auto", has_servers=True).engine == "mpi"


GPU0, GPU1 = (DeviceCapabilities(0, Gpu(f"GPU-{n}", f"0000:{n}b:00.0"), True) for n in "01")
CPU = DeviceCapabilities(0, None, False)
LATE = GPU1._replace(obstacle="TensorFlow's devices were used before hvdtrain.init()")
PART = GPU1._replace(gpu=Gpu("GPU-1", "0000:0b:00.0"))
UNKNOWN = GPU0._replace(gpu=Gpu("a GPU 0")), GPU1._replace(gpu=Gpu("a GPU 1"))
OTHER = GPU1._replace(has_nccl=False)
OLD = DeviceCapabilities(0, Gpu("GPU-2", "0000:2b:00.0"), True, nccl=22103)


@pytest.mark.parametrize(
    ("backend", "capabilities", "engine", "reason"),
    [
        ("auto", [GPU0, GPU1], "nccl", "every rank has a GPU"),
        ("auto", [CPU, CPU], "mpi", "no rank has a GPU"),
        ("auto", [GPU0, CPU, CPU], "mpi", "only some ranks have a GPU, not ranks 1, 2"),
        (
            *("auto", [OLD, GPU0._replace(nccl=22705), GPU1], "mpi"),
            "NCCL differs: 2.21.3 on rank 0, 2.27.5 on rank 1; install the same TensorFlow and "
            "nvidia-nccl-cu12 on all hosts",
        ),
        ("auto", [OLD, GPU0], "nccl", "every rank has a GPU"),
        ("auto", [GPU0, GPU0], "mpi", "ranks 0, 1 share a GPU, which NCCL does not allow"),
        (
            *("auto", [GPU0, PART], "mpi"),
            "ranks 0, 1 use parts of one GPU (MIG), which NCCL does not allow",
        ),
        ("auto", [GPU0, PART._replace(host=1)], "nccl", "every rank has a GPU"),
        ("auto", UNKNOWN, "nccl", "every rank has a GPU"),
        ("auto", [GPU0, OTHER], "mpi", "TensorFlow has no NCCL on rank 1"),
        (
            *("auto", [GPU0, LATE], "mpi"),
            "TensorFlow's devices were used before hvdtrain.init() on rank 1",
        ),
        ("mpi", [GPU0, GPU1], "mpi", "--backend mpi"),
        ("nccl", [GPU0, GPU1], "nccl", "--backend nccl"),
        (
            *("nccl", [CPU, CPU], "nccl"),
            "--backend nccl (with TensorFlow's ring on CPUs, because no rank has a GPU)",
        ),
    ],
)
def test_engine_by_capabilities(backend, capabilities, engine, reason):
    choice = choose_device_engine(backend, capabilities, has_servers=False, elastic=False)
    assert choice[:2] == (engine, reason)


@pytest.mark.parametrize(
    ("capabilities", "reason"),
    [
        ([CPU, GPU1], "not rank 0"),
        ([GPU1, GPU1], "share a GPU"),
        ([GPU0, OTHER], "no NCCL on rank 1"),
        ([CPU, CPU._replace(obstacle=LATE.obstacle)], "used before .* on rank 1"),
        ([GPU0, PART], "parts of one GPU"),
    ],
)
def test_backend_nccl_without_capabilities_is_an_error(capabilities, reason):
    with pytest.raises(LaunchError, match=rf"--backend nccl .* is not possible: .*{reason}"):
        choose_device_engine("nccl", capabilities, has_servers=False, elastic=False)


@pytest.mark.parametrize(
    ("has_servers", "elastic", "reason"),
    [(True, False, "some ranks are parameter servers"), (False, True, "ranks may be lost")],
)
def test_nccl_needs_all_ranks(has_servers, elastic, reason):
    options = {"has_servers": has_servers, "elastic": elastic}
    assert reason in choose_device_engine("auto", [GPU0, GPU1], **options).reason
    with pytest.raises(ConfigurationError, match=reason):
        choose_device_engine("nccl", [GPU0, GPU1], **options)


def test_mpi_replaces_nccl_only_with_auto():
    choice = without_nccl("auto", "rank 1 (b): no route", failed=True)
    assert choice == ("mpi", "rank 1 (b): no route", True)
    with pytest.raises(LaunchError, match=r"--backend nccl .*: rank 1 \(b\): no route\. Fix that"):
        without_nccl("nccl", "rank 1 (b): no route", failed=True)
