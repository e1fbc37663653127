"""The interface of the queues that run jobs, and functions that return the queue of a job."""

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
    """What a backend will submit for a request."""

    def preview(self) -> str:
        """Check the plan and return what ``--dry-run`` prints.

        Raises:
            ConfigurationError: If the job can't be started as described.
            JobError: If the check itself fails.
        """


Plan = TypeVar("Plan", bound=JobPlan)


class JobBackend(Protocol[Plan]):
    """A queue that plans, submits, describes and cancels jobs."""

    def plan(self, request: JobRequest) -> Plan:
        """Return what ``submit`` will submit, without starting anything.

        Raises:
            ConfigurationError: If the job can't be started as described.
        """

    def submit(self, plan: Plan) -> None:
        """Queue a job. The job continues when this process ends.

        Raises:
            JobError: If the queue refuses the job.
            OSError: If a file can't be written or a process can't be started.
            subprocess.SubprocessError: If a process can't be started.
        """

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return the states of those jobs that the queue knows, keyed by job folder."""

    def log_lines(
        self, job: JobFolder, spec: JobSpec, after: str
    ) -> Sequence[tuple[str, str]] | None:
        """Return the time (RFC 3339) and text of each log line that is later than ``after``.

        If ``after`` is empty, return all lines. Return None if the log is in the job's folder.

        Raises:
            JobError: If the log can't be read, or has been deleted.
        """

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Remove a job that is still queued, or ask a started job to stop.

        Stopping a started job may take a while. If ``save`` is true, the ranks of a started job
        save a checkpoint first.

        Raises:
            JobError: If the queue does not answer.
            OSError: If the request can't be written or sent.
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
    """Return the backend whose queue a job is in: Slurm for ``hvdtrain run`` in a Slurm job."""
    return _BACKENDS["slurm"] if spec.slurm_job else backend_for(spec)
