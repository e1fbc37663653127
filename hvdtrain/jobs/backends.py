"""The backend of each job."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.jobs.backend import JobBackend
from hvdtrain.jobs.kubernetes.pod_backend import PodBackend
from hvdtrain.jobs.local_queue import LocalQueue
from hvdtrain.jobs.slurm import SlurmQueue
from hvdtrain.jobs.spec import BackendKind, JobSpec

__all__ = ["backend_of", "keeper_of"]

_BACKENDS: Mapping[BackendKind, JobBackend] = {
    "local": LocalQueue(),
    "slurm": SlurmQueue(),
    "kubernetes": PodBackend(),
}


def backend_of(spec: JobSpec) -> JobBackend:
    """Who is to take a job."""
    return _BACKENDS[spec.backend.kind]


def keeper_of(spec: JobSpec) -> JobBackend:
    """Who has a job: Slurm also where ``hvdtrain run`` was started in a job of Slurm's."""
    return _BACKENDS["slurm"] if spec.slurm_job else backend_of(spec)
