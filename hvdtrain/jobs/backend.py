"""The contract of a queue backend: this machine's queue, Slurm, or a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

__all__ = ["JobBackend", "JobPlan", "JobRequest", "QueueState"]


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job to plan and submit.

    Attributes:
        job: Its folder, which may not exist yet.
        spec: Its specification.
        environ: The variables of the process that submits it.
        ranks: The number of ranks; None for as many as there is room for.
    """

    job: JobFolder
    spec: JobSpec
    environ: Mapping[str, str]
    ranks: int | None


class JobPlan(Protocol):
    """What a backend would submit for a request."""

    def preview(self) -> str:
        """Return what ``--dry-run`` prints: what would be started, which is checked.

        Raises:
            ConfigurationError: The job can't be started.
            JobError: That can't be determined.
        """


class QueueState(NamedTuple):
    """The state of a job in its queue.

    Attributes:
        queue: The name of the queue.
        word: The state, as ``hvdtrain.jobs.state.status_of`` takes it.
        why: The reason for it, as the queue gives it.
        state: The state of the job if its folder does not have it and the queue knows it.
    """

    queue: str
    word: str
    why: str
    state: JobState | None = None


Plan = TypeVar("Plan", bound=JobPlan)


class JobBackend(Protocol[Plan]):
    """Plans, submits, describes and cancels jobs."""

    def plan(self, request: JobRequest) -> Plan:
        """Return what ``submit`` would submit; nothing is started.

        Raises:
            ConfigurationError: The job can't be started.
        """

    def submit(self, plan: Plan) -> None:
        """Queue a job, which outlives this process.

        Raises:
            JobError: The queue refuses it.
            OSError: Something that it needs can't be written or started.
            subprocess.SubprocessError: The same.
        """

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return the states of jobs, by their folders, as far as the queue knows them."""

    def log_lines(
        self, job: JobFolder, spec: JobSpec, after: str
    ) -> Sequence[tuple[str, str]] | None:
        """Return the log of a job that has none in its folder; None if it has.

        Args:
            job: Its folder.
            spec: Its specification.
            after: The time of a line; only later ones are returned. Empty for all.

        Returns:
            The time of each line as RFC 3339 writes it, and its text.

        Raises:
            JobError: The log can't be read, or is gone.
        """

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Ask a job to stop, which may take a while; one that is still queued is removed at once.

        Args:
            job: Its folder.
            spec: Its specification.
            is_queued: Whether it has not started.
            save: Whether its ranks save a checkpoint first.

        Raises:
            JobError: The queue can't be reached.
            OSError: The same.
        """
