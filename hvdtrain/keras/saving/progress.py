"""How far a training has come: what a checkpoint says beside its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import CheckpointError, DataError
from hvdtrain.keras.data.position import Position
from hvdtrain.keras.epochs import Place

__all__ = ["Progress"]

_COUNTS = ("epoch_step", "epochs", "passes", "ranks")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a training after a step; all of it fits into JSON.

    Attributes:
        step: Steps done since the beginning of the training.
        epoch: The epoch in work, or the next one where no step of one is done; from 0.
        place: Where the data stands.
        unit: What positions count: samples or batches.
        seed: Of all orders of the data that hvdtrain chooses.
        tensorflow_seed: TensorFlow's global seed, or None; orders of ``tf.data`` follow from it.
        presharded: Whether each rank had data of its own.
        samples: Seen since the beginning by the ranks that are left.
        callbacks: By class, what each keeps.
        history: What ``fit`` returns for the epochs so far: "epoch", numbers, and "logs", lists.
    """

    step: int
    epoch: int
    place: Place
    unit: str
    seed: int
    tensorflow_seed: int | None
    presharded: bool
    samples: int
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    history: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        position = self.place.position
        place = self.place._asdict() | {"position": position and position.to_json()}
        return {**values, "place": place}

    @classmethod
    def from_json(cls, values: Any) -> Progress:
        """What ``to_json`` made.

        Raises:
            CheckpointError: Something is missing or can't be used.
        """
        try:
            known = {entry.name: values[entry.name] for entry in dataclasses.fields(cls)}
            for name in ("step", "epoch", "seed", "samples"):
                known[name] = int(known[name])
            counts = {name: int(known["place"][name]) for name in _COUNTS}
            position = known["place"]["position"]
            known["place"] = Place(
                position=None if position is None else Position.from_json(position), **counts
            )
            return cls(**known)
        except (KeyError, TypeError, ValueError, DataError) as error:
            raise CheckpointError(
                f"The checkpoint's state.json can't be used ({type(error).__name__}: {error}); it "
                "was written by another version of hvdtrain, or changed by hand."
            ) from None

    @property
    def within_epoch(self) -> bool:
        """Whether some steps of the epoch are done."""
        return self.place.epoch_step > 0
