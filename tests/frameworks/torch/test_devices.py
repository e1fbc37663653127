"""The binding of ranks to GPUs in programs that use PyTorch, with a fake driver."""

from __future__ import annotations

import socket

from tests.harness.fake_driver import TWO_GPUS, A, B, FakeDriver
from tests.harness.jobs import mpirun_argv

# PyTorch's build for CPUs sees no GPU. The program makes it count those that libcuda shows.
_PROGRAM = """
import sys, torch
from hvdtrain.cluster.gpus import cuda_gpus

if "sees" in sys.argv:
    torch.cuda.device_count = lambda: len(cuda_gpus())
torch.cuda.set_device = lambda index: print("bound", cuda_gpus()[index].id)
import hvdtrain.torch
hvdtrain.torch.init()
"""


def test_ranks_bind_their_gpus_and_the_chief_reports_problems(
    environment, run_command, fake_driver: FakeDriver
) -> None:
    environ = {**fake_driver.environ(TWO_GPUS), "CUDA_VISIBLE_DEVICES": "0,1"}
    python = environment("torch")
    done = run_command(mpirun_argv(2, [python, "-c", _PROGRAM, "sees"]), env=environ)
    assert done.returncode == 0, done
    assert sorted(done.stdout.split()) == sorted(["bound", A, "bound", B])
    host = socket.gethostname()
    for line in (
        "GPUs differ, and all ranks wait for the slowest: ",
        f", {A}) is faulty: 2 uncorrectable memory errors",
        f", {B}) is in use by process 1 (",
    ):
        assert done.stderr.count(line) == 1, done
    done = run_command([python, "-c", _PROGRAM], env=environ)
    assert done.returncode == 0, done
    assert f"{host} has GPUs, but PyTorch is built without CUDA: install" in done.stderr
