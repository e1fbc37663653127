"""The queues that run jobs: their contract, and the queue of each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hvdtrain.jobs.folder import JobFolder, JobRequest
from hvdtrain.jobs.kubernetes.pod_backend import PodBackend
from hvdtrain.jobs.local_queue import LocalQueue
from hvdtrain.jobs.slurm import SlurmQueue
from hvdtrain.jobs.spec import BackendKind, JobSpec
from hvdtrain.jobs.state import QueueState

__all__ = ["JobBackend", "JobPlan", "backend_for", "queue_for"]


class JobPlan(Protocol):
    """What a backend submits for a request."""

    def preview(self) -> str:
        """Check the plan and return what ``--dry-run`` prints.

        Raises:
            ConfigurationError: The job can't be started as described.
            JobError: The check itself fails.
        """


Plan = TypeVar("Plan", bound=JobPlan)


class JobBackend(Protocol[Plan]):
    """A queue that plans, submits, describes and cancels jobs."""

    def plan(self, request: JobRequest) -> Plan:
        """Return what ``submit`` submits; nothing is started.

        Raises:
            ConfigurationError: The job can't be started as described.
        """

    def submit(self, plan: Plan) -> None:
        """Queue a job, which outlives this process.

        Raises:
            JobError: The queue refuses the job.
            OSError: A file can't be written or a process can't be started.
            subprocess.SubprocessError: A process can't be started.
        """

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return the states of the jobs that the queue knows, by folder."""

    def log_lines(
        self, job: JobFolder, spec: JobSpec, after: str
    ) -> Sequence[tuple[str, str]] | None:
        """Return the time (RFC 3339) and text of log lines that are later than ``after``.

        All lines are returned if ``after`` is empty, and None if the job's folder has the log.

        Raises:
            JobError: The log can't be read, or has been deleted.
        """

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Remove a queued job at once; request a started one to stop, which may take a while.

        With ``save``, its ranks save a checkpoint first.

        Raises:
            JobError: The queue does not answer.
            OSError: The request can't be written or sent.
        """


_BACKENDS: Mapping[BackendKind, JobBackend[Any]] = {
    "local": LocalQueue(),
    "slurm": SlurmQueue(),
    "kubernetes": PodBackend(),
}


def backend_for(spec: JobSpec) -> JobBackend[Any]:
    """Return the backend that a job is submitted to."""
    return _BACKENDS[spec.backend.kind]


def queue_for(spec: JobSpec) -> JobBackend[Any]:
    """Return the backend that has a job: Slurm if ``hvdtrain run`` is part of a Slurm job."""
    return _BACKENDS["slurm"] if spec.slurm_job else backend_for(spec)
