"""Sets of ranks that combine their tensors, and records of which ranks contributed to a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

from hvdtrain.collectives.engine import Engine
from hvdtrain.frameworks.interface import DeviceReductions

__all__ = ["Contributions", "EngineRanks", "Ranks"]


class Ranks(Protocol):
    """A set of ranks of the job.

    After ``shutdown`` and a new ``init``, the set uses a new engine.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks in the set, numbered as in the whole job."""

    @property
    def alone(self) -> bool:
        """Whether this rank is, and always was, the only rank that combines tensors."""

    def included(self) -> bool:
        """Return whether this process belongs to the set."""

    def collectives(self) -> Engine:
        """Return the engine that runs the collectives of the set at the moment."""

    def device_collectives(self) -> DeviceReductions | None:
        """Return the object that reduces tensors on devices, or None."""


@dataclasses.dataclass(frozen=True)
class EngineRanks:
    """All ranks of an engine."""

    engine: Engine  # the engine
    # Reduces tensors on devices. None if this is not possible.
    on_devices: DeviceReductions | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """The numbers of all ranks of the engine."""
        return range(self.engine.size)

    @property
    def alone(self) -> bool:
        """Whether this is the only rank, in a job that is not elastic."""
        return self.engine.size == 1 and not self.engine.survives_losses

    def included(self) -> bool:
        """Return True, because this rank belongs to the engine."""
        return True

    def collectives(self) -> Engine:
        """Return the engine, which runs the collectives of these ranks."""
        return self.engine

    def device_collectives(self) -> DeviceReductions | None:
        """Return the object that reduces tensors on devices, or None."""
        return self.on_devices


class Contributions:
    """Records which ranks contributed to each step, by their numbers at the start of the job.

    Each step adds an entry. One call of Keras' train function may run several steps, so call
    ``take`` between two of these calls.
    """

    def __init__(self) -> None:
        self._steps: list[frozenset[int] | None] = []

    def begin_step(self) -> None:
        """Add an empty entry for a new step."""
        self._steps.append(None)

    def add(self, members: Iterable[int]) -> None:
        """Record the ranks that contributed to some gradients of the current step."""
        if self._steps:
            before = self._steps[-1]
            self._steps[-1] = frozenset(members) if before is None else before & set(members)

    def take(self) -> list[frozenset[int] | None]:
        """Return an entry for each step: the ranks that contributed to all gradients of the step.

        The entries are then cleared. The entry of a step that averages no gradients is None. If
        gradients are accumulated over several steps, only the last of these steps averages them.
        """
        steps, self._steps = self._steps, []
        return steps
