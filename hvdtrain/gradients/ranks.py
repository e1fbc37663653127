"""Sets of ranks that combine tensors, and the ranks that contributed to each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

from hvdtrain.collectives.engine import Engine
from hvdtrain.tensorflow.device_collectives import DeviceCollectives

__all__ = ["Contributions", "EngineRanks", "Ranks"]


class Ranks(Protocol):
    """A set of the job's ranks. Its engine changes after ``shutdown`` and ``init``."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks in the set, numbered as in the job."""

    @property
    def alone(self) -> bool:
        """Whether this rank has always been the only one to combine tensors."""

    def included(self) -> bool:
        """Return whether this process belongs to the set."""

    def collectives(self) -> Engine:
        """Return the current engine of the set."""

    def device_collectives(self) -> DeviceCollectives | None:
        """Return the collectives on devices, if any."""


@dataclasses.dataclass(frozen=True)
class EngineRanks:
    """All ranks of an engine.

    Attributes:
        engine: The engine.
        on_devices: Combines tensors on devices, if available.
    """

    engine: Engine
    on_devices: DeviceCollectives | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks."""
        return range(self.engine.size)

    @property
    def alone(self) -> bool:
        """Whether this is the only rank, in a job that is not elastic."""
        return self.engine.size == 1 and not self.engine.survives_losses

    def included(self) -> bool:
        """Return True."""
        return True

    def collectives(self) -> Engine:
        """Return the engine."""
        return self.engine

    def device_collectives(self) -> DeviceCollectives | None:
        """Return the collectives on devices, if any."""
        return self.on_devices


class Contributions:
    """The ranks that contributed to each step, numbered as at the start of the job.

    Each step adds an entry, and one call of a train function may run several steps. Use ``take``
    between calls.
    """

    def __init__(self) -> None:
        self._steps: list[frozenset[int] | None] = []

    def begin_step(self) -> None:
        """Start a step."""
        self._steps.append(None)

    def add(self, members: Iterable[int]) -> None:
        """Record the initial ranks that contributed to some gradients of the current step."""
        if self._steps:
            before = self._steps[-1]
            self._steps[-1] = frozenset(members) if before is None else before & set(members)

    def take(self) -> list[frozenset[int] | None]:
        """Return and clear the initial ranks that contributed to all gradients of each step.

        The entry of a step without an average is None. If gradients are accumulated over several
        steps, only the last of these steps has an average.
        """
        steps, self._steps = self._steps, []
        return steps
