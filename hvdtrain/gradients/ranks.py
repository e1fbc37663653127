"""The ranks that combine tensors, and what they combine them by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from hvdtrain.collectives.engine import Engine
from hvdtrain.tensorflow.device_collectives import DeviceCollectives

__all__ = ["EngineRanks", "Ranks"]


class Ranks(Protocol):
    """Some ranks of the job, which may have another engine after ``shutdown`` and ``init``."""

    @property
    def ranks(self) -> Sequence[int]:
        """Their numbers in the job."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody to combine anything with, and never was."""

    def included(self) -> bool:
        """Whether this rank is one of them."""

    def collectives(self) -> Engine:
        """Return their current engine."""

    def device_collectives(self) -> DeviceCollectives | None:
        """Return what combines their tensors where those are; None where nothing does."""


@dataclasses.dataclass(frozen=True)
class EngineRanks:
    """All ranks of one engine, this one among them.

    Attributes:
        engine: The engine.
        on_devices: What combines tensors where they are, if anything does.
    """

    engine: Engine
    on_devices: DeviceCollectives | None = None

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.engine.size)

    @property
    def alone(self) -> bool:
        return self.engine.size == 1 and not self.engine.survives_losses

    def included(self) -> bool:
        return True

    def collectives(self) -> Engine:
        return self.engine

    def device_collectives(self) -> DeviceCollectives | None:
        return self.on_devices
