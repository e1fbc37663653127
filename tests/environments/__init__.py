"""Python environments for tests, with a different MPI, a different Keras, or Horovod.

``python -m tests.environments [NAME ...]`` creates them, and ``plugin.py`` has a fixture for them.
``NAME.txt`` lists the packages of an environment, and ``packages.txt`` the Debian packages.

Environments with a different MPI or Keras, ``torch``, ``jax`` and ``optional`` are in ``.venvs``
and find other packages in the project's environment. Environments with Horovod are independent.
They take minutes to build, so they are in the user's cache, under names that contain a hash of
their contents.

``horovod-optimised`` is for benchmarks (``make bench``), ``torch`` for benchmarks and tests with
PyTorch, and ``jax`` for tests with JAX. They are only created when named.
``kubernetes`` contains programs, built by ``kubernetes.py``, in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness.jobs import REPOSITORY

__all__ = [
    "BELOW",
    "BUILD",
    "CACHE",
    "HERE",
    "HOROVODS",
    "HOROVODS_PYTHON",
    "KERAS",
    "KUBERNETES",
    "OPTIONAL",
    "PEERS",
    "SAME",
    "SYSTEM_MPIRUN",
    "build_of",
    "folder_of",
    "missing_environment",
    "requirements_of",
    "stamp_of",
]

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hvdtrain-tests")
# Environments that extend another one.
BELOW = {"horovod-keras3": "horovod"}
# Environments with the packages of another one, built with other options.
SAME = {"horovod-optimised": "horovod"}
HOROVODS = ("horovod", *SAME, *BELOW)
# Only created when named.
PEERS = (*SAME, "torch", "jax")
KUBERNETES = "kubernetes"
# Optional packages.
OPTIONAL = "optional"
# The oldest and newest versions that pyproject.toml allows.
KERAS = ("keras-oldest", "keras-newest")
# The newest Python for the TensorFlow that Horovod needs.
HOROVODS_PYTHON = "python3.11"
BUILD = {
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    # Without optimization it builds in half the time.
    "HOROVOD_DEBUG": "1",
}
# The mpirun of the system.
SYSTEM_MPIRUN = "/usr/bin/mpirun"


def folder_of(name: str) -> Path:
    """Return the folder of an environment."""
    if name in (*HOROVODS, KUBERNETES):
        return CACHE / f"{name}-{_digest(name)[:16]}"
    return REPOSITORY / ".venvs" / name


def build_of(name: str) -> dict[str, str]:
    """Return the environment variables for building Horovod."""
    return {key: value for key, value in BUILD.items() if name not in SAME or "DEBUG" not in key}


def requirements_of(name: str) -> list[str]:
    """Return the requirements of an environment."""
    lines = (HERE / f"{SAME.get(name, name)}.txt").read_text().splitlines()
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


def stamp_of(name: str) -> tuple[Path, str]:
    """Return the path and content of the file that marks a complete environment."""
    return folder_of(name) / ".complete", _digest(name)


@functools.cache
def _digest(name: str) -> str:
    """Return a hash of the environment's contents."""
    if name == KUBERNETES:
        return hashlib.sha256((HERE / "kubernetes.py").read_bytes()).hexdigest()
    layers = [requirements_of(layer) for layer in (name, BELOW.get(name)) if layer]
    if name in HOROVODS:
        contents = repr((layers, _horovods_python(), _system_mpi(), sorted(build_of(name).items())))
    else:
        contents = repr((layers, sys.prefix, sys.version))
    return hashlib.sha256(contents.encode()).hexdigest()


def missing_environment(name: str) -> str | None:
    """Return why the environment can't be used and how to create it; None if it can be used."""
    path, content = stamp_of(name)
    remedy = f"create it with: {sys.executable} -m tests.environments {name}"
    if not path.exists():
        return f"{folder_of(name)} does not exist; {remedy}"
    if path.read_text() != content:
        return f"{folder_of(name)} is out of date; {remedy}"
    if name == "openmpi4":
        text = _system_mpi()
        if "(Open MPI) 4." not in text:
            return f"{SYSTEM_MPIRUN} must be Open MPI 4, got {text!r}; install Debian's openmpi-bin"
    return None


def _horovods_python() -> str:
    """Return the prefix and version of the Python behind links, virtual environments and shims."""
    return _output_of(
        HOROVODS_PYTHON, "-I", "-c", "import sys; print(sys.base_prefix, sys.version)"
    )


def _system_mpi() -> str:
    return _output_of(SYSTEM_MPIRUN, "--version")


def _output_of(name: str, *arguments: str) -> str:
    program = shutil.which(name)
    if program is None:
        return "nothing"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    return done.stdout.strip()
