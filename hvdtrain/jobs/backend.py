"""The protocol of what runs jobs: this machine's queue, Slurm, or a cluster of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

__all__ = ["Answer", "JobBackend"]


class Answer(NamedTuple):
    """What a queue says of a job.

    Attributes:
        queue: Which queue, as a person names it.
        word: The job's state there, as ``hvdtrain.jobs.state.status_of`` takes it.
        why: The reason for that, in the queue's words.
        state: The job's state if no folder has it and the queue knows it.
    """

    queue: str
    word: str
    why: str
    state: JobState | None = None


class JobBackend(Protocol):
    """Takes jobs, tells of those that wait or have gone without a word, and ends them."""

    def plan(
        self, folder: Path, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
    ) -> str:
        """What would be started, in words or as what takes jobs reads it; nothing is.

        Args:
            folder: The folder that the job would have.
            spec: What is asked for.
            environ: The variables of who asks.
            ranks: How many ranks are asked for; None for as many as there is room for.

        Raises:
            ConfigurationError: It can't be started; the message says why.
            JobError: That can't be told.
        """

    def hand_over(
        self, job: JobFolder, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
    ) -> None:
        """Have a job run, now or in its turn, whatever becomes of this process; as ``plan``.

        Raises:
            JobError: It is not taken.
            OSError: Something that is needed for it can't be written or started.
            subprocess.SubprocessError: The same.
        """

    def ask(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, Answer]:
        """Return what the queue says of jobs, by their folders; nothing if there is no queue."""

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

    def stop(self, job: JobFolder, spec: JobSpec, *, waits: bool, save: bool) -> bool:
        """Have a job end that is not over; it may take a while to do so.

        Args:
            job: Its folder.
            spec: What was asked for.
            waits: Whether it is still in the queue.
            save: Whether its ranks are to save what they have before.

        Returns:
            Whether it has been taken out of the queue, and has nobody who would say so.

        Raises:
            JobError: It can't be told.
            OSError: The same.
        """
