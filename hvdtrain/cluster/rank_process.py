"""The process that has a rank's place in the job; its children inherit its environment.

Launchers tell a rank who it is by environment variables, which every child process sees as well. A
child must not enter MPI with them: the other ranks know its parent by that number. So the first
process that enters the job as this rank notes itself in its environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

__all__ = ["claim_rank", "find_rank_process"]

_CLAIM = "HVDTRAIN_RANK_PROCESS"
# They tell a rank from those of other jobs, which a program of this job may start.
_IDENTITY = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    *("PMI_RANK", "PMI_FD", "PMI_PORT"),
    *("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    "HVDTRAIN_JOB",
)


def claim_rank(environ: MutableMapping[str, str]) -> None:
    """Note for children that this process is the rank that ``environ`` describes."""
    environ[_CLAIM] = f"{os.getpid()} {_identity(environ)}"


def find_rank_process(environ: Mapping[str, str]) -> int | None:
    """Return the number of the process that is this rank, if that is another; None otherwise."""
    pid, _, identity = environ.get(_CLAIM, "").partition(" ")
    if not pid or int(pid) == os.getpid() or identity != _identity(environ):
        return None
    return int(pid)


def _identity(environ: Mapping[str, str]) -> str:
    return ",".join(environ.get(name, "") for name in _IDENTITY)
