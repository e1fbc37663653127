"""The binding of ranks to GPUs, with a fake driver."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tensorflow as tf

from hvdtrain.cluster.gpu_assignment import RankGpus
from hvdtrain.cluster.gpus import Gpu
from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Settings
from hvdtrain.frameworks.tensorflow.devices import bind, find_gpus
from hvdtrain.log import configure_log
from tests.harness.fake_driver import TWO_GPUS, A, B, FakeDriver, uuid_of
from tests.harness.jobs import Completed
from tests.launch.jobs import HVDTRAIN, ON_CLUSTER
from tests.testbed.cluster import Cluster

needs_no_gpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU"
)


@needs_no_gpu
def test_without_gpus_there_are_no_ids() -> None:
    assert find_gpus(Topology(), {"CUDA_VISIBLE_DEVICES": "0,1"}).visible == []
    assert find_gpus(Topology(), {}, needed=False).visible is None


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [({}, "01"), ({"CUDA_VISIBLE_DEVICES": "4,7"}, "47"), ({"HIP_VISIBLE_DEVICES": "2,3"}, "23")],
)
def test_gpus_that_cuda_does_not_describe(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], numbers: str
) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0", "GPU:1"])
    visible = find_gpus(Topology(), environ).visible
    host = socket.gethostname()
    assert visible == [Gpu(f"{host} GPU {number}") for number in numbers]


def report(visible: list[list[Gpu] | None], rank: int = 0, log_level: str = "info") -> None:
    topology = Topology(rank=rank, size=len(visible), local_rank=rank, local_size=len(visible))
    configure_log(log_level)
    bind(topology, Settings(), [RankGpus(hostname="a", pid=1, visible=one) for one in visible])


def test_only_the_chief_reports_missing_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    report([[], []], rank=1)
    report([[], []], log_level="warning")
    assert capsys.readouterr().err == ""
    report([[], []])
    assert capsys.readouterr().err == "hvdtrain: no GPU found; computing on the CPU\n"


def test_ranks_without_a_gpu_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    report([[], [Gpu("GPU-b0")], []])
    assert (
        "2 of 3 ranks run without a GPU and slow down the others: 0, 2" in capsys.readouterr().err
    )


# TensorFlow's build for CPUs sees no GPU. The program makes it list the GPUs that libcuda shows, as
# the build for GPUs does, and records how it is configured. CUDA starts with the first list.
_BIND = """
import functools, os
import tensorflow as tf
from hvdtrain.cluster.gpus import cuda_gpus

cpus = tf.config.list_physical_devices("CPU")
growing = []

@functools.cache
def all_gpus():
    return [
        tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU")
        for index in range(len(cuda_gpus()))
    ]

def list_devices(kind=None):
    return [device for device in cpus + all_gpus() if kind in (None, device.device_type)]

visible = list_devices
def set_visible(devices, kind):
    global visible
    assert kind == "GPU"
    visible = lambda kind: devices

tf.config.list_physical_devices = list_devices
tf.config.get_visible_devices = lambda kind: visible(kind)
tf.config.set_visible_devices = set_visible
tf.config.experimental.get_memory_growth = lambda device: device in growing
tf.config.experimental.set_memory_growth = lambda device, value: growing.append(device)

import hvdtrain
hvdtrain.init()
assert growing == visible("GPU")
indices = [device.name[-1] for device in visible("GPU")]
ids = [cuda_gpus()[int(index)].id for index in indices]
print("bound", hvdtrain.rank(), *indices, *ids, flush=True)
"""
# Libraries in LD_LIBRARY_PATH are unknown to a forked Python, until they are loaded.
_LOAD = """
import ctypes, json, os, sys
os.environ.update(json.loads(sys.argv[1]))
os.environ["FAKE_GPUS"] += os.environ.get("SLURM_PROCID") or os.environ["OMPI_COMM_WORLD_RANK"]
for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
    ctypes.CDLL(os.path.join(os.environ["LD_LIBRARY_PATH"].split(":")[0], library))
"""


def bound(done: Completed) -> list[str]:
    """Return rank, index and ID of each rank's GPU."""
    lines = [line.partition("bound ")[2] for line in done.stdout.splitlines()]
    return sorted(line for line in lines if line)


@pytest.fixture
def on_two_ranks(
    run_command, mpirun, fake_driver: FakeDriver, forked_python, tmp_path: Path
) -> Callable[..., Completed]:
    """Return a function that runs a program on two ranks, with a description of GPUs each."""
    script = tmp_path / "program.py"

    def run(
        program: str, *gpus: str, options: Sequence[str] | None = None, **variables: str
    ) -> Completed:
        script.write_text(_LOAD + program)
        for rank in (0, 1):
            fake_driver.environ(gpus[rank % len(gpus)], f"gpus.{rank}")
        environ = {**fake_driver.environ("", "gpus."), **variables}
        python = [*forked_python, str(script), json.dumps(environ)]
        if options is None:
            return run_command(mpirun(2, python), timeout_s=100)
        argv = [*HVDTRAIN, "-np", "2", *options, "--", *python]
        return run_command(argv, timeout_s=100, env={"CUDA_VISIBLE_DEVICES": None, **variables})

    return run


@pytest.mark.mpi
@pytest.mark.essential
def test_ranks_bind_their_gpus(on_two_ranks) -> None:
    done = on_two_ranks(_BIND, TWO_GPUS, options=[])
    assert done.returncode == 0, done
    assert bound(done) == [f"0 0 {B}", f"1 1 {A}"]
    host = socket.gethostname()
    for line in (
        "GPUs differ, and all ranks wait for the slowest: NVIDIA H100 (80 GiB) on "
        f"{host}; NVIDIA T4 (16 GiB) on {host}",
        f"on {host}, GPU 0 (NVIDIA T4, {A}) is faulty: 2 uncorrectable memory errors",
        f"on {host}, GPU 1 (NVIDIA H100, {B}) is in use by process 1 (",
    ):
        assert done.stderr.count(line) == 1, done


@pytest.mark.mpi
def test_more_ranks_than_gpus(on_two_ranks) -> None:
    one = {"CUDA_VISIBLE_DEVICES": "GPU-aaaa,-1,0"}
    done = on_two_ranks(_BIND, TWO_GPUS, options=[], **one)
    assert done.returncode == 2, done
    assert "There are more ranks than GPUs: localhost has 1 GPU for 2 ranks" in done.stderr
    # mpirun doesn't know how many GPUs there are.
    done = on_two_ranks(_BIND, TWO_GPUS, **one)
    assert done.returncode != 0, done
    error = f"There are more ranks than GPUs: rank 1 sees 1 GPU, all in use ({A}: rank 0)"
    assert f"LaunchError: {error}" in done.stderr
    done = on_two_ranks(_BIND, TWO_GPUS, options=["--share-gpus"], **one)
    assert done.returncode == 0, done
    assert bound(done) == [f"0 0 {A}", f"1 0 {A}"]
    assert f"GPUs are shared: ranks 0, 1 use {A} on {socket.gethostname()}" in done.stderr


@pytest.mark.mpi
def test_a_launcher_shows_each_rank_one_gpu(on_two_ranks) -> None:
    """Slurm hides the other GPUs, so each rank sees its own as number 0."""
    first, second = TWO_GPUS.split(f"gpu {B}")
    done = on_two_ranks(_BIND, first, f"gpu {B} {second}", CUDA_VISIBLE_DEVICES="0")
    assert bound(done) == [f"0 0 {A}", f"1 0 {B}"]
    # Scripts between mpirun and Python often do the same.
    program = 'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]'
    done = on_two_ranks(program + _BIND, TWO_GPUS)
    assert bound(done) == [f"0 0 {B}", f"1 0 {A}"]


def test_a_slurm_job_on_two_hosts(
    cluster: Cluster, fake_driver: FakeDriver, forked_python: list[str]
) -> None:
    libraries = shutil.copytree(fake_driver.libraries, cluster.folder / "driver")
    driver = FakeDriver(libraries, cluster.folder)
    first, second = TWO_GPUS.split(f"gpu {B}")
    driver.environ(first, "gpus.0")
    driver.environ(f"gpu {B} {second}", "gpus.1")
    environ = {**driver.environ("", "gpus."), "CUDA_VISIBLE_DEVICES": "0"}
    (cluster.folder / "program.py").write_text(_LOAD + _BIND)
    argv = ["srun", "--mpi=pmix", "-N2", "-n2", *forked_python, "program.py", json.dumps(environ)]
    done = cluster.run(argv, env=ON_CLUSTER, timeout_s=100)
    assert done.returncode == 0, done
    assert bound(done) == [f"0 0 {A}", f"1 0 {B}"]
    kinds = "NVIDIA T4 (16 GiB) on node1; NVIDIA H100 (80 GiB) on node2"
    warning = f"GPUs differ, and all ranks wait for the slowest: {kinds}\n"
    assert done.stderr.count(warning) == 1, done
    assert done.stderr.count("on node1, GPU 0 (NVIDIA T4, ") == 1, done
    assert done.stderr.count("on node2, GPU 0 (NVIDIA H100, ") == 1, done


@pytest.mark.mpi
def test_each_rank_gets_a_part_of_a_gpu(on_two_ranks) -> None:
    parts = [uuid_of(digit, "MIG") for digit in "01"]
    lines = [f"gpu {A}\nmodel NVIDIA A100\nbus 0000:3B:00.0"]
    lines += [f"part {part}\nmodel NVIDIA A100 MIG 3g.20gb" for part in parts]
    gpus = "\n".join(lines)
    done = on_two_ranks(_BIND, gpus, gpus, CUDA_VISIBLE_DEVICES=",".join(parts))
    assert bound(done) == [f"0 0 {parts[0]}", f"1 0 {parts[1]}"]


@needs_no_gpu
@pytest.mark.mpi
def test_gpus_that_tensorflow_can_not_use(on_two_ranks) -> None:
    program = "import hvdtrain; hvdtrain.init()"
    done = on_two_ranks(program, f"cuda 802\n{TWO_GPUS}", TWO_GPUS, CUDA_VISIBLE_DEVICES="0")
    has_gpus = f"{socket.gethostname()} has GPUs, but"
    assert "no GPU found; computing on the CPU" in done.stderr
    assert done.stderr.count(f"{has_gpus} CUDA fails: system not yet initialized") == 1
    assert done.stderr.count(f"{has_gpus} TensorFlow is built without CUDA") == 1
    done = on_two_ranks(program, f"cuda 802\n{TWO_GPUS}", TWO_GPUS, CUDA_VISIBLE_DEVICES="-1")
    assert "has GPUs" not in done.stderr
    done = on_two_ranks(program, "cuda 802", "nvml 9\ncuda 999", CUDA_VISIBLE_DEVICES="0")
    assert "has GPUs" not in done.stderr


@needs_no_gpu
@pytest.mark.mpi
def test_a_driver_that_never_answers_does_not_block_ranks(on_two_ranks) -> None:
    gpus = f"hang 2\n{TWO_GPUS}"
    done = on_two_ranks("import hvdtrain; hvdtrain.init()", gpus, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done
    assert "no GPU found; computing on the CPU" in done.stderr


PARALLEL_OPERATIONS = """
import os, threading
import numpy as np, tensorflow as tf
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.environ.pop("TF_NUM_INTEROP_THREADS", None)
if rank == 1:
    os.environ["TF_NUM_INTEROP_THREADS"] = "1"
if rank == 2:
    tf.config.threading.set_inter_op_parallelism_threads(3)
import hvdtrain
hvdtrain.init()
started = [threading.Event(), threading.Event()]

def meet(number):
    started[number].set()
    return np.bool_(started[1 - number].wait(2))

@tf.function
def both(first, second):
    # Stateless operations may run in parallel.
    return [tf.numpy_function(meet, [n], tf.bool, stateful=False) for n in (first, second)]

met = all(value.numpy() for value in both(tf.constant(0), tf.constant(1)))
print(rank, met, tf.config.threading.get_inter_op_parallelism_threads(), flush=True)
"""


@pytest.mark.parametrize(
    ("bucket_bytes", "lines"),
    [("100000", ["0 True 2", "1 False 0", "2 True 3"]), ("0", ["0 False 0"])],
)
def test_a_rank_with_one_core_computes_during_buckets(
    launch, bucket_bytes: str, lines: list[str]
) -> None:
    done = launch(
        len(lines), PARALLEL_OPERATIONS, env={"HVDTRAIN_BUCKET_BYTES": bucket_bytes}, timeout_s=100
    )
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, lines), done
