"""The progress of a training: what a checkpoint holds next to its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot
from hvdtrain.errors import CheckpointError, DataError
from hvdtrain.keras.data.partition import Position
from hvdtrain.keras.epoch_iterator import EpochIterator, EpochPlace
from hvdtrain.keras.model_parts import built_variable_indices
from hvdtrain.keras.saving.callback_states import callback_states
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.tensorflow import random_seed

__all__ = ["TrainingProgress", "WorkerPosition", "take_snapshot"]

_NONE = -1


@dataclass(frozen=True)
class WorkerPosition:
    """The position of one rank, in trainings where not all ranks are after the same step.

    Attributes:
        epoch: The current or next epoch, from 0.
        place: Its place in the data.
        samples: The number of samples it has trained on.
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
        """Return the position that ``to_numbers`` was called on.

        Args:
            numbers: The numbers that it returned.
            ranks: How many ranks there are.
            begins: Where passes of this rank began, if not at their start; the missed places that
                are left are the last of theirs.
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
        """Return the position that ``dataclasses.asdict`` turned into ``value``.

        Raises:
            DataError: Its position in the data is not valid.
            KeyError: Something else is missing.
        """
        place = EpochPlace.from_json(value["place"])
        return cls(int(value["epoch"]), place, int(value["samples"]))


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The state of a training after a step; all of it fits into JSON.

    Attributes:
        step: Completed steps of the training.
        epoch: The current or next epoch, from 0.
        place: The place in the data.
        unit: The unit that positions count: samples or batches.
        seed: The seed of all orders of the data that hvdtrain chooses.
        tensorflow_seed: TensorFlow's global seed, or None; orders of ``tf.data`` follow from it.
        presharded: Whether each rank passed its own part of the data.
        samples: The number of samples that the remaining ranks have trained on.
        callbacks: The state of each callback, by its class.
        history: Logs of the epochs so far, as ``fit`` returns them: "epoch", numbers, and "logs",
            lists.
        others: The positions of the ranks after the chief; empty if all are at the chief's.
        begins: Where passes began, if not at their start, for ``others``.
        each: Units that a rank takes in a step; 0 if unknown.
        built: For each optimizer, the places of the variables that it was built for.
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
        """Return the progress that ``to_json`` was called on.

        Raises:
            CheckpointError: Something is missing or can't be used.
        """
        try:
            # Checkpoints of earlier versions lack the last ones.
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


def take_snapshot(
    state: TrainingState,
    epochs: EpochIterator,
    ranks: Mapping[str, np.ndarray],
    others: Sequence[WorkerPosition],
    *,
    epoch: int,
    epoch_step: int,
    logs: Mapping[str, Any] | None,
    seed: int,
) -> Snapshot:
    """Copy the content of a checkpoint; the next call overwrites the copies.

    Args:
        epochs: The iterator over ``fit``'s data.
        ranks: Each rank's own values, from ``TrainingState.gather_own``.
        others: The positions of the ranks after the chief, if they differ.
        epoch: The current or next epoch.
        epoch_step: Completed steps of it.
        logs: The logs of an epoch that has just ended.
        seed: The seed of the data's orders.
    """
    counted = {
        f"rank/{rank}/samples": np.array(other.samples) for rank, other in enumerate(others, 1)
    }
    ranks = {**ranks, **counted}
    kept, arrays = callback_states(state.callbacks)
    data, place = epochs.sharded, epochs.place(epoch_step=epoch_step)
    progress = TrainingProgress(
        step=epochs.step,
        epoch=epoch,
        place=place,
        unit=data.unit,
        seed=seed,
        tensorflow_seed=random_seed.current_seed(),
        presharded=data.presharded,
        samples=sum(int(ranks[f"rank/{rank}/samples"]) for rank in range(place.ranks)),
        callbacks=kept,
        history=_history_so_far(state.model.history, epoch - 1, logs),
        others=others,
        begins=list(epochs.begins.values()),
        each=data.each,
        built=built_variable_indices(state.model),
    )
    model = {**state.shared(), **arrays}
    return Snapshot(step=epochs.step, state=progress.to_json(), model=model, ranks=ranks)


def _history_so_far(history: Any, epoch: int, logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the logs that ``fit`` will return for the epochs so far, as plain values.

    ``logs`` belong to ``epoch`` if it has just ended, and else are None: Keras' callback
    ``history`` records them only later.
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
