"""``hvdtrain run --check-build``: what there is to train with, in the form of horovodrun's."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.mpirun import find_mpirun
from hvdtrain.remote.host_probe import installed_versions

__all__ = ["describe", "look"]

_INSTALL = {
    "TensorFlow": 'python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")',
    "Keras": "python -m pip install keras",
    "mpi4py": "python -m pip install mpi4py",
}


def look(environ: Mapping[str, str]) -> str:
    """Returns the lines that tell what there is; loads none of it."""
    mpirun = problem = ""
    try:
        found = find_mpirun(Path(sys.executable).parent, environ)
        mpirun = f"{found.name}, {found.path}"
    except LaunchError as error:
        problem = str(error)
    return describe(installed_versions(), mpirun=mpirun, problem=problem, nccl=_nccl())


def describe(
    versions: Mapping[str, str], *, mpirun: str = "", problem: str = "", nccl: str = ""
) -> str:
    """Returns the lines that tell of what was found.

    Args:
        versions: The versions of the installed packages by name.
        mpirun: The mpirun that there is, with its path; empty for none.
        problem: Why there is no mpirun, and what to do.
        nccl: The version of NCCL that TensorFlow's GPU build has; empty without one.
    """
    version = versions.get
    has_mpi = bool(mpirun and version("mpi4py"))
    mpi4py = f"mpi4py {version('mpi4py')}" if version("mpi4py") else "no mpi4py"
    lines = [
        f"hvdtrain v{version('hvdtrain')}:",
        "",
        "Available Frameworks:",
        _line("TensorFlow", version("tensorflow", "")),
        _line("Keras", version("keras", "")),
        "",
        "Available Controllers:",
        _line("MPI", f"{mpirun or 'no mpirun'}; {mpi4py}", has_mpi),
        "",
        "Available Tensor Operations:",
        _line("NCCL", nccl or "comes with TensorFlow's GPU build", has=bool(nccl)),
        _line("MPI", "", has_mpi),
        _line("shared memory", "", has_mpi),
    ]
    remedies = [
        f"{title}: {remedy}" for title, remedy in _INSTALL.items() if not version(title.lower())
    ]
    if problem:
        remedies.append(f"MPI: {problem}")
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
