"""The position of a rank in its training, where not all ranks are after the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.epoch_iterator import EpochPlace

__all__ = ["WorkerPosition"]

_NONE = -1


@dataclass(frozen=True)
class WorkerPosition:
    """The position of one rank in its training.

    Attributes:
        epoch: The epoch in work, or the next one where no step of one is done; from 0.
        place: Where its data stands.
        samples: How many samples it has trained on.
    """

    epoch: int
    place: EpochPlace
    samples: int

    def to_numbers(self) -> tuple[int, ...]:
        """Return nine numbers, for ``from_numbers``."""
        place, position = self.place, self.place.position
        counts = (self.epoch, self.samples, place.epoch_step, place.epochs, place.passes)
        if position is None:
            return (*counts, *[_NONE] * 4)
        return (
            *counts,
            position.epoch,
            position.start,
            len(position.missed),
            _NONE if position.joint_batch is None else position.joint_batch,
        )

    @classmethod
    def from_numbers(
        cls, numbers: tuple[int, ...], *, ranks: int, begins: Mapping[int, Position]
    ) -> WorkerPosition:
        """The position that ``to_numbers`` was called on.

        Args:
            numbers: The numbers that it returned.
            ranks: How many ranks there are.
            begins: Where passes of this rank began that did not begin at their start: what is left
                of the places that were missed in one are the last of those that were.
        """
        epoch, samples, epoch_step, epochs, passes, *rest = numbers
        position = None
        if rest[0] != _NONE:
            missed = begins[rest[0]].missed[-rest[2] :] if rest[2] else ()
            joint_batch = None if rest[3] == _NONE else rest[3]
            position = Position(
                epoch=rest[0], start=rest[1], missed=missed, joint_batch=joint_batch
            )
        place = EpochPlace(
            position=position, epoch_step=epoch_step, epochs=epochs, passes=passes, ranks=ranks
        )
        return cls(epoch, place, samples)

    @classmethod
    def from_json(cls, value: Any) -> WorkerPosition:
        """The position of which ``dataclasses.asdict`` made this.

        Raises:
            DataError: Its position in the data is not valid.
            KeyError: Something else is missing.
        """
        place = EpochPlace.from_json(value["place"])
        return cls(int(value["epoch"]), place, int(value["samples"]))
