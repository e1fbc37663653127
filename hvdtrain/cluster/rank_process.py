"""Distinguishes the process that is a rank from its child processes.

Launchers identify a rank by environment variables, which its child processes inherit. A child must
not enter MPI with these variables, because the other ranks would take the child for its parent. So
the process that enters the job writes its process ID into its environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

__all__ = ["claim_rank", "find_rank_process"]

_CLAIM = "HVDTRAIN_RANK_PROCESS"
# Variables that differ between jobs. They are compared because a rank may start another job.
_IDENTITY = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    *("PMI_RANK", "PMI_FD", "PMI_PORT"),
    *("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    "HVDTRAIN_JOB",
)


def claim_rank(environ: MutableMapping[str, str]) -> None:
    """Record this process as the rank that ``environ`` describes."""
    environ[_CLAIM] = f"{os.getpid()} {_identity(environ)}"


def find_rank_process(environ: Mapping[str, str]) -> int | None:
    """Return the ID of the process that is this rank; None if unknown, or if it is this process."""
    pid, _, identity = environ.get(_CLAIM, "").partition(" ")
    if not pid or int(pid) == os.getpid() or identity != _identity(environ):
        return None
    return int(pid)


def _identity(environ: Mapping[str, str]) -> str:
    return ",".join(environ.get(name, "") for name in _IDENTITY)
