"""The progress of a training: what a checkpoint says beside its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.errors import CheckpointError, DataError
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.epoch_iterator import EpochPlace
from hvdtrain.keras.saving.worker_position import WorkerPosition

__all__ = ["TrainingProgress", "history_so_far"]


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The state of a training after a step; all of it fits into JSON.

    Attributes:
        step: Steps done since the beginning of the training.
        epoch: The epoch in work, or the next one where no step of one is done; from 0.
        place: Where the data stands.
        unit: The unit that positions count: samples or batches.
        seed: The seed of all orders of the data that hvdtrain chooses.
        tensorflow_seed: TensorFlow's global seed, or None; orders of ``tf.data`` follow from it.
        presharded: Whether each rank had data of its own.
        samples: How many the ranks that are left have seen since the beginning.
        callbacks: The state of each callback, by its class.
        history: Logs of the epochs so far, as ``fit`` returns them: "epoch", numbers, and "logs",
            lists.
        others: Where the ranks after the chief stand, in their order, where each goes its own way;
            empty where all are where the chief is.
        begins: Where passes began that did not begin at their start, for ``others``.
        each: Units that a rank takes in a step; 0 where not known.
        built: For each optimizer the places of the variables that it was built for.
    """

    step: int
    epoch: int
    place: EpochPlace
    unit: str
    seed: int
    tensorflow_seed: int | None
    presharded: bool
    samples: int
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    history: Mapping[str, Any] = field(default_factory=dict)
    others: Sequence[WorkerPosition] = ()
    begins: Sequence[Position] = ()
    each: int = 0
    built: Sequence[Sequence[int]] = ()

    def to_json(self) -> dict[str, Any]:
        """This progress as a dictionary of plain values."""
        return {
            **vars(self),
            "place": dataclasses.asdict(self.place),
            "others": [dataclasses.asdict(worker) for worker in self.others],
            "begins": [dataclasses.asdict(position) for position in self.begins],
        }

    @classmethod
    def from_json(cls, values: Any) -> TrainingProgress:
        """The progress that ``to_json`` was called on.

        Raises:
            CheckpointError: Something is missing or can't be used.
        """
        try:
            # The last ones are not in checkpoints of earlier versions.
            given = {"others": (), "begins": (), "each": 0, "built": (), **values}
            known = {entry.name: given[entry.name] for entry in dataclasses.fields(cls)}
            for name in ("step", "epoch", "seed", "samples", "each"):
                known[name] = int(known[name])
            known["place"] = EpochPlace.from_json(known["place"])
            known["others"] = [WorkerPosition.from_json(worker) for worker in known["others"]]
            known["begins"] = [Position.from_json(position) for position in known["begins"]]
            known["built"] = [[int(place) for place in places] for places in known["built"]]
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


def history_so_far(history: Any, epoch: int, logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The logs that ``fit`` will return for the epochs so far, in plain values.

    ``logs`` are those of ``epoch``, which has just ended; None if none has. ``history`` is Keras'
    callback, which notes them only after this.
    """
    epochs, values = list(history.epoch), {k: list(v) for k, v in history.history.items()}
    if logs is not None:
        epochs.append(epoch)
        for name, value in logs.items():
            values.setdefault(name, []).append(value)
    return {
        "epoch": [int(number) for number in epochs],
        "logs": {
            name: [float(value) for value in entries if np.ndim(value) == 0]
            for name, entries in values.items()
        },
    }
