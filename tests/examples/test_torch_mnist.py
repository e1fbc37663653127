"""The example for PyTorch."""

from __future__ import annotations

from tests.examples.digits import MNIST
from tests.harness.jobs import mpirun_argv


def test_two_ranks_learn_the_digits_with_pytorch(environment, run_command) -> None:
    program = [str(environment("torch")), str(MNIST.with_name("torch_mnist.py")), "--epochs", "1"]
    done = run_command(mpirun_argv(2, program), timeout_s=100)
    assert done.returncode == 0, done
    accuracy = done.stdout.split("test accuracy = ")[1]
    assert float(accuracy) > 0.9, done
