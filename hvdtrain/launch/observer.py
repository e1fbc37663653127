"""Events of a job, and the base class of their observers."""

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
    """The ranks of an attempt are about to start.

    ``hosts`` maps each host to its number of ranks. ``mpi`` is the name of the MPI.
    """

    ranks: int
    hosts: Mapping[str, int]
    mpi: str


@dataclass(frozen=True, kw_only=True)
class AttemptEnded:
    """An attempt has ended, with messages in ``words``. ``Outcome`` describes other fields."""

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
    """A rank died after ``step``. ``words`` is the message about the loss."""

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
    """The progress of a job. Unknown values are None or 0."""

    step: int | None
    epoch: int | None
    total_steps: int | None
    own_s: Sequence[float] = ()  # each rank's own time per step, in seconds
    reduced_bytes_per_s: int = 0  # bytes that all ranks together pass to allreduce per second
    slow: tuple[int, float, str | None] | None = None  # straggler: rank, factor, host
    samples: int | None = None  # number of samples trained on
    loss: float | None = None
    held_by: Sequence[int] = ()  # ranks that the others wait for


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """A table of the ranks: columns such as step, phase and memory with one value per rank."""

    columns: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How the job's time was spent, from ``hvdtrain.launch.restart.goodput``."""

    shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """The job has ended. ``verdict`` is the message that explains why."""

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
    """A base class that ignores all events.

    Methods are called from the launcher's main thread, and must neither block nor raise.
    """

    @property
    def holds_up(self) -> bool:
        """Whether ranks should pause until the observer has processed their lines."""
        return False

    def line(self, rank: int, stream: str, text: str) -> None:
        """Receive a line that a rank printed."""

    def notice(self, text: str) -> None:
        """Receive a message from the launcher."""

    def on_event(self, event: Event) -> None:
        """Receive an event."""
