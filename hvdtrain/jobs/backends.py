"""The backend of each job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.jobs.backend import JobBackend
from hvdtrain.jobs.kubernetes.pod_backend import PodBackend
from hvdtrain.jobs.local_queue import LocalQueue
from hvdtrain.jobs.slurm import SlurmQueue
from hvdtrain.jobs.spec import BackendKind, JobSpec

__all__ = ["backend_of", "queue_of"]

_BACKENDS: Mapping[BackendKind, JobBackend[Any]] = {
    "local": LocalQueue(),
    "slurm": SlurmQueue(),
    "kubernetes": PodBackend(),
}


def backend_of(spec: JobSpec) -> JobBackend[Any]:
    """Return the backend that a job is submitted to."""
    return _BACKENDS[spec.backend.kind]


def queue_of(spec: JobSpec) -> JobBackend[Any]:
    """Return the backend that has a job: Slurm also if ``hvdtrain run`` is part of a Slurm job."""
    return _BACKENDS["slurm"] if spec.slurm_job else backend_of(spec)
