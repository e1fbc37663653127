"""``hvdtrain run --check-build``: what there is to train with, in the form of horovodrun's."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.mpirun import find_mpirun
from hvdtrain.remote.host_probe import installed_versions

__all__ = ["Build", "describe", "look"]

_INSTALL = {
    "TensorFlow": 'python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")',
    "Keras": "python -m pip install keras",
    "mpi4py": "python -m pip install mpi4py",
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """What was found.

    Attributes:
        versions: Versions of the installed packages by name.
        mpirun: Which there is, with its path; empty for none.
        problem: Why there is no mpirun, and what to do.
        nccl: The version of NCCL that TensorFlow's GPU build has; empty without one.
    """

    versions: Mapping[str, str]
    mpirun: str = ""
    problem: str = ""
    nccl: str = ""


def look(environ: Mapping[str, str]) -> Build:
    """Look, without loading any of it."""
    versions = installed_versions()
    try:
        mpirun = find_mpirun(Path(sys.executable).parent, environ)
    except LaunchError as error:
        return Build(versions=versions, problem=str(error), nccl=_nccl())
    return Build(versions=versions, mpirun=f"{mpirun.name}, {mpirun.path}", nccl=_nccl())


def describe(build: Build) -> str:
    """The lines that tell of it."""
    version = build.versions.get
    has_mpi = bool(build.mpirun and version("mpi4py"))
    mpi4py = f"mpi4py {version('mpi4py')}" if version("mpi4py") else "no mpi4py"
    lines = [
        f"hvdtrain v{version('hvdtrain')}:",
        "",
        "Available Frameworks:",
        _line("TensorFlow", version("tensorflow", "")),
        _line("Keras", version("keras", "")),
        "",
        "Available Controllers:",
        _line("MPI", f"{build.mpirun or 'no mpirun'}; {mpi4py}", has_mpi),
        "",
        "Available Tensor Operations:",
        _line("NCCL", build.nccl or "comes with TensorFlow's GPU build", has=bool(build.nccl)),
        _line("MPI", "", has_mpi),
        _line("shared memory", "", has_mpi),
    ]
    remedies = [
        f"{title}: {remedy}" for title, remedy in _INSTALL.items() if not version(title.lower())
    ]
    if build.problem:
        remedies.append(f"MPI: {build.problem}")
    if remedies:
        lines += ["", "Missing:", *(f"    {remedy}" for remedy in remedies)]
    else:
        lines += ["", "Whether all of it works together: hvdtrain check"]
    return "\n".join(lines)


def _nccl() -> str:
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _line(title: str, words: str, has: bool | None = None) -> str:
    mark = "X" if (bool(words) if has is None else has) else " "
    return f"    [{mark}] {title}" + (f" ({words})" if words else "")
