"""The progress of a training that checkpoints contain, and functions that save and restore it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.collectives.engine import Engine
from hvdtrain.data.partition import Position
from hvdtrain.errors import CheckpointError, DataError, RanksLostError
from hvdtrain.trainer.epoch_iterator import EpochIterator, EpochPlace
from hvdtrain.trainer.learning_rate import rescale_restored_rate
from hvdtrain.trainer.model_parts import build_optimizers, built_variable_indices, optimizers_of
from hvdtrain.trainer.saving.callback_states import (
    callback_arrays,
    callback_states,
    restore_callbacks,
)
from hvdtrain.trainer.saving.random_state import tensorflow_seed
from hvdtrain.trainer.saving.training_state import (
    TrainingState,
    ignored_random_states,
    unsent_of,
)

__all__ = [
    "TrainingProgress",
    "WorkerPosition",
    "broadcast_arrays",
    "find_checkpoint",
    "move_data",
    "restore_saved_callbacks",
    "restore_training",
    "take_snapshot",
]

_NONE = -1
# How long to wait for the last writer. After a host was lost, NFS may keep its lock for 90 s.
LOCK_TIMEOUT_S = 120.0
_CHIEF_LOST = "The rank that read the checkpoint was lost. Start the job again."


@dataclass(frozen=True)
class WorkerPosition:
    """How far one rank has read its data. Used if ranks are at different steps."""

    epoch: int  # The current epoch or, between two epochs, the next one. The first epoch is 0.
    place: EpochPlace  # the position in the data
    samples: int  # the number of samples that the rank has trained on

    def to_numbers(self) -> tuple[int, ...]:
        """Return this position as nine numbers, which ``from_numbers`` converts back."""
        place, position = self.place, self.place.position
        counts = (self.epoch, self.samples, place.epoch_step, place.epochs, place.passes)
        if position is None:
            return (*counts, *[_NONE] * 4)
        joint_batch = _NONE if position.joint_batch is None else position.joint_batch
        return (*counts, position.epoch, position.start, len(position.missed), joint_batch)

    @classmethod
    def from_numbers(
        cls, numbers: tuple[int, ...], *, ranks: int, begins: Mapping[int, Position]
    ) -> WorkerPosition:
        """Create a position from the result of ``to_numbers``.

        Args:
            numbers: The result of ``to_numbers``.
            ranks: The number of ranks.
            begins: For each epoch, the position where the rank's pass over the data started. In
                this position, ``missed`` lists the units of data that lost ranks had taken.
                ``numbers`` contains only how many of these units are still missed. They are always
                the last ones.
        """
        epoch, samples, epoch_step, epochs, passes, *rest = numbers
        position = None
        if rest[0] != _NONE:
            pass_epoch, start, missed, joint_batch = rest
            position = Position(
                epoch=pass_epoch,
                start=start,
                missed=begins[pass_epoch].missed[-missed:] if missed else (),
                joint_batch=None if joint_batch == _NONE else joint_batch,
            )
        place = EpochPlace(
            position=position, epoch_step=epoch_step, epochs=epochs, passes=passes, ranks=ranks
        )
        return cls(epoch, place, samples)

    @classmethod
    def from_json(cls, value: Any) -> WorkerPosition:
        """Create a position from a dictionary that ``dataclasses.asdict`` returned."""
        place = EpochPlace.from_json(value["place"])
        return cls(int(value["epoch"]), place, int(value["samples"]))


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The state of a training without its arrays, which a checkpoint contains as JSON."""

    step: int  # the number of completed steps of the training
    epoch: int  # The current epoch or, between two epochs, the next one. The first epoch is 0.
    place: EpochPlace  # the position in the data
    unit: str  # the unit of positions: "samples" or "batches"
    seed: int  # the seed that determines the order of data that hvdtrain shuffles, such as arrays
    # TensorFlow's global seed, which determines the order of ``tf.data``
    tensorflow_seed: int | None
    presharded: bool  # whether each rank has different data
    samples: int  # the number of samples that all ranks have trained on
    # the state of each callback, by its class name
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # The history that ``fit`` returns, so far. "epoch" is a list of epochs, and "logs" maps each
    # name to a list of values.
    history: Mapping[str, Any] = field(default_factory=dict)
    # The positions of all ranks except the chief. Empty if all ranks are at the chief's position.
    others: Sequence[WorkerPosition] = ()
    # The positions where passes over the data started, except for passes that started at the
    # beginning of the data. They are needed to interpret ``others``.
    begins: Sequence[Position] = ()
    each: int = 0  # The number of units that a rank takes in a step. 0 if unknown.
    # for each optimizer, the indices of the model's variables for which it was built
    built: Sequence[Sequence[int]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return this progress as a dictionary of plain values."""
        return {
            **vars(self),
            "place": dataclasses.asdict(self.place),
            "others": [dataclasses.asdict(worker) for worker in self.others],
            "begins": [dataclasses.asdict(position) for position in self.begins],
        }

    @classmethod
    def from_json(cls, values: Any) -> TrainingProgress:
        """Create a ``TrainingProgress`` from the result of ``to_json``.

        Raises:
            CheckpointError: If an entry is missing or not valid.
        """
        try:
            # Checkpoints of earlier versions lack these entries.
            values = {"others": (), "begins": (), "each": 0, "built": (), **values}
            known = {entry.name: values[entry.name] for entry in dataclasses.fields(cls)}
            for name in ("step", "epoch", "seed", "samples", "each"):
                known[name] = int(known[name])
            known["place"] = EpochPlace.from_json(known["place"])
            known["others"] = [WorkerPosition.from_json(worker) for worker in known["others"]]
            known["begins"] = [Position.from_json(position) for position in known["begins"]]
            known["built"] = [[int(index) for index in indices] for indices in known["built"]]
            return cls(**known)
        except (KeyError, TypeError, ValueError, DataError) as error:
            raise CheckpointError(
                f"The checkpoint's state.json is not valid ({type(error).__name__}: {error}). It "
                "was edited, or written by a different version of hvdtrain."
            ) from None

    @property
    def within_epoch(self) -> bool:
        """Whether training stopped within an epoch, so that some of its steps are done."""
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
    """Return a copy of the training's state. The next call overwrites its arrays.

    ``ranks`` contains the own values of all ranks, as ``TrainingState.gather_own`` returns them.
    ``logs`` are the logs of an epoch that has just ended, or None.
    """
    for rank, other in enumerate(others, 1):
        ranks = {**ranks, f"rank/{rank}/samples": np.array(other.samples)}
    callbacks, arrays = callback_states(state.callbacks)
    data, place = epochs.sharded, epochs.place(epoch_step=epoch_step)
    progress = TrainingProgress(
        step=epochs.step,
        epoch=epoch,
        place=place,
        unit=data.unit,
        seed=seed,
        tensorflow_seed=tensorflow_seed(),
        presharded=data.presharded,
        samples=sum(int(ranks[f"rank/{rank}/samples"]) for rank in range(place.ranks)),
        callbacks=callbacks,
        history=_history_so_far(state.model.history, epoch - 1, logs),
        others=others,
        begins=list(epochs.begins.values()),
        each=data.each,
        built=built_variable_indices(state.model),
    )
    model = {**state.shared(), **arrays}
    return Snapshot(step=epochs.step, state=progress.to_json(), model=model, ranks=ranks)


def _history_so_far(history: Any, epoch: int, logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the history with the ``logs`` of this epoch, which Keras adds only later."""
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


def find_checkpoint(
    store: Store | None, state: TrainingState, collectives: Engine
) -> tuple[TrainingProgress, Snapshot | None] | None:
    """Return the newest checkpoint in the chief's store. All ranks must call this.

    After this call, no other job can write to the store.

    ``store`` is None on all ranks but the chief.

    Returns:
        Two values: the progress, and the whole checkpoint. The second is None on all ranks except
        the chief. If the store is empty, the function returns None.

    Raises:
        CheckpointError: If another job writes to the store, all checkpoints are damaged, or the
            newest one belongs to a different model. Every rank raises this error.
    """
    snapshot = None
    answer: dict[str, Any] = {}
    if store is None:
        answer["error"] = _CHIEF_LOST  # broadcast only if the chief is lost
    else:
        try:
            # If the directory can't be written to, each attempt to save reports that.
            with contextlib.suppress(OSError):
                store.lock(LOCK_TIMEOUT_S)
            snapshot = store.newest()
            if snapshot is not None:
                build_optimizers(state.model, TrainingProgress.from_json(snapshot.state).built)
                state.check(snapshot.model)
                answer.update(state=snapshot.state, unsent=unsent_of(snapshot.ranks))
        except CheckpointError as error:
            answer["error"] = str(error)
    with collectives.without_timeout():  # the chief's disk may be slow
        answer = collectives.broadcast_object(answer, name="newest checkpoint")
    if "error" in answer:
        raise CheckpointError(answer["error"])
    if "state" not in answer:
        return None
    progress = TrainingProgress.from_json(answer["state"])
    build_optimizers(state.model, progress.built)
    state.allocate_residuals(answer["unsent"])
    return progress, snapshot


def move_data(
    epochs: EpochIterator, progress: TrainingProgress, warn: Callable[[str], None]
) -> None:
    """Make training continue at the checkpoint's position in the data.

    Raises:
        CheckpointError: If the checkpoint was taken within an epoch, and with a different kind of
            data.
    """
    data = epochs.sharded
    if progress.place.position is not None and progress.unit != data.unit:
        raise CheckpointError(
            f"The checkpoint was taken within a pass over data that is divided into "
            f"{progress.unit}, got data that is divided into {data.unit}. Resume with the same "
            "kind of input, or start over in another directory."
        )
    seed = tensorflow_seed()
    if progress.within_epoch and data.follows_global_seed and progress.tensorflow_seed != seed:
        warn(
            f"the tf.data pipeline shuffles, but TensorFlow's global seed was "
            f"{progress.tensorflow_seed} and is {seed} now. The rest of the epoch has a different "
            "order, so some samples are used twice and others not at all. Call "
            "keras.utils.set_random_seed(1) at the start of the program to resume exactly"
        )
    epochs.resume(progress.place, epoch=progress.epoch, step=progress.step)


def restore_training(
    progress: TrainingProgress,
    snapshot: Snapshot | None,
    state: TrainingState,
    warn: Callable[[str], None],
) -> None:
    """Restore the model and the callbacks from the chief's snapshot. All ranks must call this."""
    ranks, collectives = progress.place.ranks, state.collectives
    state.restore_shared(None if snapshot is None else snapshot.model)
    for optimizer in optimizers_of(state.model):
        rescale_restored_rate(optimizer, ranks, collectives.size)
    arrays = None if snapshot is None else callback_arrays(snapshot.model)
    restore_saved_callbacks(progress, broadcast_arrays(arrays, collectives), state, warn)
    if snapshot is not None and not state.keeps_unsent and unsent_of(snapshot.ranks):
        warn(
            "the residuals of compressed gradients in the checkpoint are ignored, because "
            "gradients are sent uncompressed. Use the same --compression as before to apply them"
        )
    if snapshot is not None and (ignored := ignored_random_states(snapshot.ranks)):
        warn(
            f"the checkpoint was saved on another backend of Keras, so these random states in it "
            f"are ignored: {', '.join(ignored)}. Random numbers, as in Dropout layers, differ from "
            "a run without interruption"
        )
    # Restore random states last, because the calls above may draw random numbers.
    state.restore_own(None if snapshot is None else snapshot.ranks, ranks)
    if not collectives.allreduce(np.array(snapshot is not None), "max", name="restored"):
        raise RanksLostError(_CHIEF_LOST)


def restore_saved_callbacks(
    progress: TrainingProgress,
    arrays: Mapping[str, np.ndarray],
    state: TrainingState,
    warn: Callable[[str], None],
) -> None:
    """Restore the callbacks, and warn about saved callbacks that ``fit`` doesn't have."""
    for name in restore_callbacks(state.callbacks, progress.callbacks, arrays):
        warn(f"the checkpoint contains callback {name}, but fit doesn't; its state is ignored")


def broadcast_arrays(
    arrays: Mapping[str, np.ndarray] | None, collectives: Engine
) -> dict[str, np.ndarray]:
    """Return the chief's arrays on all ranks. All ranks except the chief pass None."""
    own = arrays or {}
    kinds = [(key, array.dtype.name, array.shape) for key, array in own.items()]
    kinds = collectives.broadcast_object(kinds, name="arrays of a checkpoint")
    return {
        key: collectives.broadcast(
            own.get(key, np.empty(shape, np.dtype(dtype))), name=f"checkpoint's {key}"
        )
        for key, dtype, shape in kinds
    }
