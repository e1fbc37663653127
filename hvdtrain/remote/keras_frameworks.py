"""The frameworks on which Keras can run, and a probe of one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from hvdtrain.errors import LaunchError
from hvdtrain.remote.run_capture import run_capture

__all__ = ["FRAMEWORKS", "IMPORT_TIMEOUT_S", "Framework", "count_gpus"]

# From a busy file server, the import takes much longer than the usual five seconds.
IMPORT_TIMEOUT_S = 25.0
_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # Otherwise JAX would reserve the memory of all GPUs.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


class Framework(NamedTuple):
    """A framework, as Keras' backend."""

    title: str  # its name in messages
    distributions: tuple[str, ...]  # Python packages that provide it
    install: str  # how to install it
    with_gpus: str  # how to install it with support for NVIDIA GPUs
    gpu_program: str  # Python code that prints the number of GPUs that it sees


# By the name of Keras' backend.
FRAMEWORKS: Mapping[str, Framework] = {
    "tensorflow": Framework(
        "TensorFlow",
        ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tensorflow-aarch64"),
        'python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")',
        'python -m pip install "hvdtrain[gpu]"',
        "import tensorflow; print(len(tensorflow.config.list_physical_devices('GPU')))",
    ),
    "torch": Framework(
        "PyTorch",
        ("torch",),
        'python -m pip install "hvdtrain[torch]"',
        "a build with CUDA, from pytorch.org/get-started",
        "import torch; print(torch.cuda.device_count())",
    ),
    "jax": Framework(
        "JAX",
        ("jax",),
        'python -m pip install "hvdtrain[jax]"',
        'python -m pip install "jax[cuda12]"',
        "import jax; print(sum(one.platform == 'gpu' for one in jax.local_devices()))",
    ),
}


def count_gpus(backend: str) -> int:
    """Import the framework of a Keras backend, and return the number of GPUs that it sees.

    A child process imports it, because the import may end the process.

    Raises:
        LaunchError: If the framework can't be imported, or if it fails.
        TimeoutError: If the import takes too long.
    """
    argv = [sys.executable, "-P", "-c", FRAMEWORKS[backend].gpu_program]
    try:
        done = run_capture(argv, environ={**_QUIET, **os.environ}, timeout_s=IMPORT_TIMEOUT_S)
    except LaunchError:
        raise TimeoutError(f"not imported within {IMPORT_TIMEOUT_S:g} s") from None
    lines = done.stdout.split()
    if done.returncode == 0 and lines:
        return int(lines[-1])
    errors = done.stderr.strip().splitlines()
    raise LaunchError(errors[-1] if errors else f"exit code {done.returncode}")
