"""Python environments for tests: with another MPI or Keras than the project's, and with Horovod.

``python -m tests.environments [NAME ...]`` makes them; ``plugin.py`` gives them to tests. There is
a file ``NAME.txt`` for each, with what pip installs; ``packages.txt`` has the Debian packages that
they use.

Those with another MPI or Keras, with PyTorch, and ``optional`` are in ``.venvs`` and find all else
in the project's own environment. Those with Horovod have nothing of that and take minutes, so
they are in the user's cache, for all checkouts, under names that tell what they are made of.

``horovod-optimised`` and ``torch`` are for benchmarks (``make bench``), and made when named.
``kubernetes`` is no environment of Python's but programs, which ``kubernetes.py`` builds; it is in
the user's cache as well.
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
# An environment that finds what it lacks in another.
BELOW = {"horovod-keras3": "horovod"}
# One that is made of the same as another, and only built otherwise.
SAME = {"horovod-optimised": "horovod"}
HOROVODS = ("horovod", *SAME, *BELOW)
# What hvdtrain is compared with; no test needs it.
PEERS = (*SAME, "torch")
KUBERNETES = "kubernetes"
# Packages that hvdtrain goes without.
OPTIONAL = "optional"
# The ends of what pyproject.toml allows.
KERAS = ("keras-oldest", "keras-newest")
# The last Python that the TensorFlow which Horovod builds against runs on.
HOROVODS_PYTHON = "python3.11"
BUILD = {
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    # Not optimised: it builds in half the time, and how fast Horovod is doesn't matter to tests.
    "HOROVOD_DEBUG": "1",
}
# Where mpirun is that no pip has installed.
SYSTEM_MPIRUN = "/usr/bin/mpirun"


def folder_of(name: str) -> Path:
    """Where the environment is, or will be."""
    if name in (*HOROVODS, KUBERNETES):
        return CACHE / f"{name}-{_digest(name)[:16]}"
    return REPOSITORY / ".venvs" / name


def build_of(name: str) -> dict[str, str]:
    """What Horovod is built with, as variables of the environment."""
    return {key: value for key, value in BUILD.items() if name not in SAME or "DEBUG" not in key}


def requirements_of(name: str) -> list[str]:
    """What pip installs into it."""
    lines = (HERE / f"{SAME.get(name, name)}.txt").read_text().splitlines()
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


def stamp_of(name: str) -> tuple[Path, str]:
    """A file that is in the environment once it is complete, and what it then holds."""
    return folder_of(name) / ".complete", _digest(name)


@functools.cache
def _digest(name: str) -> str:
    """Of what it is made of."""
    if name == KUBERNETES:
        return hashlib.sha256((HERE / "kubernetes.py").read_bytes()).hexdigest()
    layers = [requirements_of(layer) for layer in (name, BELOW.get(name)) if layer]
    if name in HOROVODS:
        made_of = repr((layers, _horovods_python(), _system_mpi(), sorted(build_of(name).items())))
    else:
        made_of = repr((layers, sys.prefix, sys.version))
    return hashlib.sha256(made_of.encode()).hexdigest()


def missing_environment(name: str) -> str | None:
    """Why the environment can't be used, and how to get it; None where it can."""
    path, content = stamp_of(name)
    how = f"make it with: {sys.executable} -m tests.environments {name}"
    if not path.exists():
        return f"there is no {folder_of(name)}; {how}"
    if path.read_text() != content:
        return f"{folder_of(name)} is out of date; {how}"
    if name == "openmpi4":
        text = _system_mpi()
        if "(Open MPI) 4." not in text:
            return f"{SYSTEM_MPIRUN} is {text!r}, not Open MPI 4; install Debian's openmpi-bin"
    return None


def _horovods_python() -> str:
    """The Python itself, be it found by a link, in a virtual environment or through a shim."""
    return _answer_of(
        HOROVODS_PYTHON, "-I", "-c", "import sys; print(sys.base_prefix, sys.version)"
    )


def _system_mpi() -> str:
    return _answer_of(SYSTEM_MPIRUN, "--version")


def _answer_of(name: str, *arguments: str) -> str:
    program = shutil.which(name)
    if program is None:
        return "nothing"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    return done.stdout.strip()
