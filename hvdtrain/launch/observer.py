"""Events of a job, and the observer that receives them. Nothing here knows who listens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AttemptBegan",
    "AttemptEnded",
    "CheckpointSaved",
    "Event",
    "JobEnded",
    "Observer",
    "Progress",
    "RankLost",
    "RankTable",
    "Restarting",
    "Summary",
]


@dataclass(frozen=True, kw_only=True)
class AttemptBegan:
    """The ranks are about to start: how many, on which hosts, and by which MPI."""

    ranks: int
    hosts: Mapping[str, int]
    mpi: str


@dataclass(frozen=True, kw_only=True)
class AttemptEnded:
    """An attempt is over; the fields are those of ``hvdtrain.launch.failure.Outcome``."""

    code: int
    cause: str
    step: int | None
    saved: int | None
    lost_s: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Restarting:
    """The job waits for its next attempt."""


@dataclass(frozen=True, kw_only=True)
class RankLost:
    """A rank died after ``step``; ``words`` describe it."""

    rank: int
    host: str
    step: int | None
    words: str


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """The checkpoint of ``step`` is complete."""

    step: int | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a job; None or 0 for unknown.

    Attributes:
        step: Completed optimizer steps.
        epoch: The epoch of the last step.
        total_steps: The step with which training ends.
        own_s: What each rank takes for a step itself, in seconds.
        reduced_bytes_per_s: What all ranks put into allreduce.
        slow: A rank that holds the others up, with its factor and host.
        samples: Samples that all ranks have trained on.
        loss: The recent loss.
        held_by: Ranks that all others wait for.
    """

    step: int | None
    epoch: int | None
    total_steps: int | None
    own_s: Sequence[float] = ()
    reduced_bytes_per_s: int = 0
    slow: tuple[int, float, str | None] | None = None
    samples: int | None = None
    loss: float | None = None
    held_by: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """Columns with a value for each rank: its step, phase, memory and so on."""

    columns: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Shares of the job's time by what they went into; ``kept`` is training that counts."""

    shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """The job is over; ``verdict`` is what the user reads of it."""

    code: int
    cause: str
    verdict: str


Event = (
    AttemptBegan
    | AttemptEnded
    | Restarting
    | RankLost
    | CheckpointSaved
    | Progress
    | RankTable
    | Summary
    | JobEnded
)


class Observer:
    """Receives all that happens to a job, and does nothing; a base for those that do.

    Methods are called from the launcher's thread: they must neither block nor raise.
    """

    @property
    def holds_up(self) -> bool:
        """Whether ranks should pause until the observer has caught up with their lines."""
        return False

    def line(self, rank: int, stream: str, text: str) -> None:
        """Take a line that a rank printed."""

    def notice(self, text: str) -> None:
        """Take a message of the launcher."""

    def on_event(self, event: Event) -> None:
        """Take an event."""
