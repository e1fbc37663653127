"""Test of the devices before training, with TensorFlow's ring. On GPUs, NCCL would run instead."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hvdtrain.frameworks.tensorflow import device_probe

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

START = """
import itertools, os, signal, socket, sys, threading, time
import keras
import numpy as np
import tensorflow as tf
import hvdtrain
from hvdtrain import job_entry, world
from hvdtrain.cluster.gpus import Gpu
from hvdtrain.private_api import tensorflow as private_tensorflow
from hvdtrain.frameworks.tensorflow import device_connection, device_probe

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
fault = sys.argv[1]
capabilities, list_devices = job_entry.DeviceCapabilities, tf.config.list_logical_devices

gpus = itertools.count()

def claim(host, gpu, has_nccl, obstacle, nccl):
    # With --backend auto, only GPUs are connected. So each CPU claims to be a GPU.
    return capabilities(host, Gpu(f"GPU-{next(gpus)}"), True, obstacle)

if os.environ["HVDTRAIN_BACKEND"] == "auto":
    job_entry.DeviceCapabilities = claim
    tf.config.list_logical_devices = lambda kind: list_devices("CPU")

if fault == "device" and rank == 1:
    missing = type("Device", (), {"name": "/job:worker/replica:0/task:1/device:GPU:3"})
    tf.config.list_logical_devices = lambda kind: [missing]

if fault in ("refused", "silent") and rank == 0:
    # Rank 1 connects to a port without TensorFlow's server.
    other = socket.socket()
    other.bind(("127.0.0.1", 0))
    if fault == "silent":
        other.listen()
    start = device_connection._exchange_addresses
    number = other.getsockname()[1]
    device_connection._exchange_addresses = lambda engine, hosts, port: start(engine, hosts, number)

if fault == "stuck" and rank == 1:
    # An operation that doesn't end, not even if collectives are aborted.
    device_probe.ABORT_TIMEOUT_S = 1
    device_probe._Attempt._reduce = lambda self: tf.queue.FIFOQueue(1, tf.float32).dequeue()

if fault in ("silent", "stuck"):
    device_probe.TIMEOUT_S = 2

if fault.startswith("stopped") and rank == 1:
    def stop(self):
        if fault == "stopped briefly" and os.fork() == 0:
            time.sleep(1)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        check(self)
    check = device_probe._Attempt._check_routes
    device_probe._Attempt._check_routes = stop
"""

TRAIN = """
hvdtrain.init()
running = [thread.name for thread in threading.enumerate() if thread.name == "hvdtrain probe"]
assert bool(running) == (fault == "stuck" and rank == 1), running
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
model.compile("sgd", "mse")
hvdtrain.distribute(model)
model.fit(np.ones([16, 4]), np.ones([16, 2]), batch_size=4, verbose=0)
weights = [array.tolist() for array in model.get_weights()]
same = world.collectives().allgather_object(weights) == [weights] * hvdtrain.size()
if fault in ("device", "refused"):
    # TensorFlow's collectives are not used again.
    hvdtrain.shutdown()
    hvdtrain.init()
kind = "devices" if world.device_collectives() else "MPI"
print(f"rank {rank} trained over {kind}: {same}", flush=True)
"""

PROBLEMS = {
    "device": r"rank 1 \(.*\): .*GPU:3",
    "refused": r"rank 1 \(.*\): no connection to rank 0 at .* refused; all hosts",
    "silent": r"rank.* 1 \(.*\): no result within 2 s; all hosts must reach each other",
    "stuck": r"rank.* 1 \(.*\): no result within 2 s; all hosts must reach each other",
}


@pytest.mark.parametrize("fault", PROBLEMS)
def test_all_ranks_use_mpi_if_one_fails(launch, fault: str) -> None:
    env = {"HVDTRAIN_BACKEND": "auto", "HVDTRAIN_SOFT_PLACEMENT": "0"}
    done = launch(2, START + TRAIN, fault, env=env, timeout_s=120)
    assert done.returncode == 0, done
    assert done.stdout.count("trained over MPI: True") == 2
    cause = r"^hvdtrain: MPI combines gradients, because NCCL failed: (.*)"
    causes = re.findall(cause, done.stderr, re.M)
    assert len(causes) == 1, done
    assert re.match(PROBLEMS[fault], causes[0]), done
    if fault in ("device", "refused"):
        assert "MPI combines gradients: TensorFlow's collectives failed before" in done.stderr


def test_a_failure_with_nccl_is_an_error_on_all_ranks(launch) -> None:
    done = launch(2, START + TRAIN, "refused", env={"HVDTRAIN_BACKEND": "nccl"}, timeout_s=60)
    assert done.returncode != 0
    error = rf"^hvdtrain.errors.LaunchError: --backend nccl .* not possible: {PROBLEMS['refused']}"
    assert len(re.findall(error, done.stderr, re.M)) == 2, done


@pytest.mark.parametrize("fault", ["none", "stopped briefly"])
def test_the_devices_are_used_after_a_test(launch, fault: str) -> None:
    done = launch(2, START + TRAIN, fault, env={"HVDTRAIN_BACKEND": "auto"}, timeout_s=60)
    assert done.stdout.count("trained over devices: True") == 2, done


def test_a_rank_that_stops_during_the_test_is_named(launch) -> None:
    env = {"HVDTRAIN_BACKEND": "auto", "HVDTRAIN_TIMEOUT_S": "6"}
    done = launch(2, START + TRAIN, "stopped", env=env, timeout_s=60)
    assert done.returncode != 0
    assert re.search(r"rank 0 waited 6 s in allgather_object\(test of devices\)", done.stderr), done


NCCL = """
const char *ncclGetLastError(void *communicator) { return "Bootstrap : no socket interface found"; }
int ncclGetVersion(int *version) { *version = 22705; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_version_and_error_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (device_probe._nccl_error(), device_probe.nccl_version()) == ("", 0)
    (tmp_path / "nccl.c").write_text(NCCL)
    folder = tmp_path / "nvidia/nccl/lib"  # where pip installs it
    folder.mkdir(parents=True)
    argv = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "nccl.c", "-o"]
    subprocess.run([*argv, str(folder / "libnccl.so.2")], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.syspath_prepend(tmp_path)
    assert device_probe.nccl_version() == 22705
    # From now on it is loaded, as TensorFlow does at the first reduction.
    assert device_probe._nccl_error() == "Bootstrap : no socket interface found"
