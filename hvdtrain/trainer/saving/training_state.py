"""The state of a training as arrays: values that all ranks share, and each rank's own values.

The weights and the optimizer are shared values, which are equal on all ranks, so only the chief's
are saved. Own values are saved for every rank. These are random states, statistics that layers keep
of the rank's batches, metrics, accumulated gradients, states of recurrent layers, the number of
samples, and residuals of compressed gradients. With ``--mode local-sgd`` the own values include the
rank's optimizer. The chief's optimizer is then also saved as a shared value, so that training can
resume in a different mode.

If a checkpoint is restored on a different number of ranks, each kind of own values has a rule.
Counts, such as the number of samples, are added up, and the chief gets the sum. Gradients and
statistics are averaged, and all ranks get the average. A rank keeps its own random state if the
checkpoint contains one for it. Recurrent states are reset, because their samples are now on other
ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.errors import CheckpointError, RanksLostError
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.private_api.keras import iterations_of, learning_rate_of
from hvdtrain.trainer.joint_results import reduction_of_metric
from hvdtrain.trainer.model_parts import (
    layer_statistics,
    optimizer_variables,
    plain_optimizers_of,
    recurrent_states,
)
from hvdtrain.trainer.model_sync import broadcast_model
from hvdtrain.trainer.moving_statistics import row_weights_of, steps_with_rows_of
from hvdtrain.trainer.optimizer_patch import accumulator_variables
from hvdtrain.trainer.rank_random import seed_generators, seed_of_rank
from hvdtrain.trainer.saving.random_state import random_state, restore_random_state
from hvdtrain.trainer.variables import array_of, assign, attach_state, dtype_of

__all__ = ["TrainingState", "ignored_random_states", "unsent_of"]

# How to convert each kind of own values to a different number of ranks. _rule handles the kinds
# that are not listed here.
_Rule = Literal["sum", "average", "chief", "seed", "reset"]
_RULES: dict[str, _Rule] = {
    "seeds": "seed",
    "states": "reset",
    "accumulated": "average",
    "samples": "sum",
    "steps": "chief",
    "random": "chief",
    "unsent": "average",
    "factors": "chief",
}
_RANDOM = "random/"
_OPTIMIZER = "optimizer/"
_OUTER = "outer/"
_OTHER_MODEL = "The checkpoint belongs to a different model or optimizer"
_REMEDY = "Resume with the model that was saved, or start over in another directory."


class TrainingState:
    """All values of a model that ``fit`` changes, as arrays.

    Args:
        model: The model, distributed and built.
        collectives: The connection between the ranks.
        samples: A variable with the number of samples that this rank has trained on.
        callbacks: The callbacks of ``fit``.
        own_optimizers: Whether each rank updates its own weights, as in ``--mode local-sgd``.
        outer: The variables of local SGD's outer optimizer, which are equal on all ranks.
        feedback: The residuals of compressed gradients, or None if gradients aren't compressed.
    """

    def __init__(
        self,
        model: keras.Model,
        collectives: Engine,
        samples: keras.Variable,
        callbacks: Sequence[Any] = (),
        *,
        own_optimizers: bool = False,
        outer: Sequence[Any] = (),
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.model = model
        self.collectives = collectives
        self.callbacks = callbacks
        self._samples = samples
        self._own_optimizers = own_optimizers
        self._outer = list(outer)
        self._feedback = feedback
        self._buffers: dict[str, np.ndarray] = {}

    def shared(self) -> dict[str, np.ndarray]:
        """Return copies of the shared values. The next call overwrites these copies."""
        copies = {}
        for place, variable in self._shared_variables().items():
            key = f"{place}/{variable.path}"
            value = array_of(variable)
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = self._buffers[key] = np.empty(value.shape, value.dtype)
            np.copyto(buffer, value)
            copies[key] = buffer
        return copies

    def copy_own(self) -> dict[str, np.ndarray]:
        """Return copies of this rank's own values, as they are before a validation.

        Values that change only when weights are updated are left out. The result can be passed to
        ``gather_own`` as ``earlier``.
        """
        values = self._own_values(accumulated=False, optimizers=False)
        return {key: array.copy() for key, array in values.items()}

    def gather_own(self, earlier: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Return the own values of all ranks on the chief, with keys ``rank/<r>/<name>``.

        All ranks must call this before the metrics are reset. If a rank is lost during the call,
        its values are missing. The result is empty on all ranks except the chief.

        ``earlier`` contains values from ``copy_own`` to use instead of the current ones.
        """
        values = {**self._own_values(accumulated=self.accumulates), **(earlier or {})}
        collectives = self.collectives
        rows = join_bytes(values)[np.newaxis]
        to_chief = [1] + [0] * (collectives.size - 1)
        received, _ = collectives.alltoall(rows, to_chief, name="own values of ranks")
        return {
            f"rank/{rank}/{key}": array
            for rank, row in enumerate(received)
            for key, array in split_bytes(row, values).items()
        }

    def check(self, saved: Mapping[str, np.ndarray]) -> None:
        """Check that saved values, which ``shared`` returned, belong to this model and optimizer.

        Raises:
            CheckpointError: If a variable is missing, or was saved but does not exist in this
                model. Also if its dtype or shape differs.
        """
        remaining = self._by_place(saved)
        for place, variable in self._shared_variables().items():
            if place.startswith(_OUTER) and place not in remaining:
                continue  # saved in another mode
            dtype, shape = dtype_of(variable), tuple(variable.shape)
            array = remaining.pop(place, None)
            if array is None or array.shape != shape or not _is_convertible(array.dtype, dtype):
                expected = f"{dtype.name} {shape}"
                actual = "nothing" if array is None else f"{array.dtype.name} {array.shape}"
                raise CheckpointError(
                    f"{_OTHER_MODEL}: {variable.path} ({place}) must be {expected}, got {actual}. "
                    f"{_REMEDY}"
                )
        if remaining:
            raise CheckpointError(
                f"{_OTHER_MODEL}, got {len(remaining)} additional variables; the first one is "
                f"{next(iter(remaining))}. {_REMEDY}"
            )

    def allocate_residuals(self, variables: Sequence[int]) -> None:
        """Allocate residuals for these variables, before ``restore_own``."""
        if self._feedback is not None:
            for number in variables:
                self._feedback.keep(self.model.trainable_variables[number])

    @property
    def keeps_unsent(self) -> bool:
        """Whether the unsent parts of compressed gradients are kept for the next step."""
        return self._feedback is not None

    def restore_shared(self, saved: Mapping[str, np.ndarray] | None) -> None:
        """Restore the weights and the optimizer on all ranks. All ranks must call this.

        ``saved`` is a result of ``shared`` on the chief, and None on other ranks.
        """
        if saved is not None:
            arrays = self._by_place(saved)
            for place, variable in self._shared_variables().items():
                resets = place.startswith(_OUTER) and place not in arrays
                assign(variable, np.zeros(variable.shape) if resets else arrays[place])
        broadcast_model(self.model, self.collectives, self._outer)

    def restore_own(self, saved: Mapping[str, np.ndarray] | None, ranks: int) -> None:
        """Restore each rank's own values. All ranks must call this.

        On the chief, ``saved`` is a result of ``gather_own`` from ``ranks`` ranks. It is None on
        other ranks.
        """
        template = self._own_values(accumulated=True)
        collectives = self.collectives
        nbytes = join_bytes(template).size
        rows = np.zeros((0, nbytes), np.uint8)
        splits = [0] * collectives.size
        if saved is not None:
            rows = np.stack(
                [
                    join_bytes(self._part(saved, template, ranks, rank, collectives.size))
                    for rank in range(collectives.size)
                ]
            )
            splits = [1] * collectives.size
        received, _ = collectives.alltoall(rows, splits, name="saved values of ranks")
        if not len(received):
            raise RanksLostError("The rank that read the checkpoint was lost. Start the job again.")
        self._assign_own(split_bytes(received[0], template))

    def restore_part(
        self, saved: Mapping[str, np.ndarray], ranks: int, *, rank: int, size: int
    ) -> None:
        """Restore this rank's own values from the own values of all ranks, without communication.

        ``saved`` is a result of ``gather_own`` from ``ranks`` ranks.
        """
        template = self._own_values(accumulated=True)
        self._assign_own(self._part(saved, template, ranks, rank, size))

    @property
    def accumulates(self) -> bool:
        """Whether gradients have been accumulated since the last update."""
        attach_state(self.model)
        return any(
            (steps := optimizer.gradient_accumulation_steps)
            and int(array_of(iterations_of(optimizer))) % steps
            for optimizer in plain_optimizers_of(self.model)
        )

    def _assign_own(self, values: Mapping[str, np.ndarray]) -> None:
        for key, variable in self._own_variables(accumulated=True, optimizers=True).items():
            assign(variable, values[key])
        random = {k.removeprefix(_RANDOM): a for k, a in values.items() if k.startswith(_RANDOM)}
        if any(array.any() for array in random.values()):
            restore_random_state(random)

    def _shared_variables(self) -> dict[str, Any]:
        """Return the variables that are equal on all ranks, with keys such as ``weights/0003``.

        The keys contain numbers instead of names, because the names of variables may change.
        """
        attach_state(self.model)
        own = self._own_variables(accumulated=True, optimizers=False).values()
        optimizers = optimizer_variables(self.model)
        kinds = {"weights": self.model.variables, "optimizer": optimizers, "outer": self._outer}
        return _numbered(kinds, without=own)

    def _by_place(self, saved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the saved arrays that this mode uses, with the keys of ``_shared_variables``."""
        kinds = ("weights", "optimizer", *(("outer",) if self._outer else ()))
        return {
            "/".join(key.split("/")[:2]): array
            for key, array in saved.items()
            if key.split("/")[0] in kinds
        }

    def _own_variables(self, *, accumulated: bool, optimizers: bool) -> dict[str, Any]:
        """Return the variables that differ between ranks, with keys such as ``metrics/0003``.

        Args:
            accumulated: Whether to include accumulated gradients.
            optimizers: Whether to include variables that change only when weights are updated.
                These are the residuals of compressed gradients. If each rank updates its own
                weights, they also include the variables of the optimizers.
        """
        model = self.model
        attach_state(model)
        kinds: dict[str, Sequence[Any]] = {
            "seeds": [generator.state for generator in seed_generators(model)],
            "statistics": [*layer_statistics(model), *row_weights_of(model)],
            "steps": steps_with_rows_of(model),
            "metrics": model.metrics_variables,
            "states": recurrent_states(model),
        }
        if accumulated:
            kinds["accumulated"] = [
                v for o in plain_optimizers_of(model) for v in accumulator_variables(o)
            ]
        variables = {**_numbered(kinds), "samples": self._samples}
        if optimizers and self._feedback is not None:
            variables.update(self._feedback.arrays(model.trainable_variables))
        if optimizers and self._own_optimizers:
            leaves = plain_optimizers_of(model)
            # Learning rates are shared: they are equal, and may depend on the number of ranks.
            shared = [
                v for leaf in leaves for v in (*accumulator_variables(leaf), learning_rate_of(leaf))
            ]
            variables.update(_numbered({"optimizer": optimizer_variables(model)}, without=shared))
        return variables

    def _own_values(self, *, accumulated: bool, optimizers: bool = True) -> dict[str, np.ndarray]:
        """Return this rank's own values. The arguments are the same as for ``_own_variables``."""
        variables = self._own_variables(accumulated=accumulated, optimizers=optimizers)
        values = {key: array_of(variable) for key, variable in variables.items()}
        values.update({_RANDOM + key: array for key, array in random_state().items()})
        return values

    def _part(
        self,
        saved: Mapping[str, np.ndarray],
        template: Mapping[str, np.ndarray],
        ranks: int,
        rank: int,
        size: int,
    ) -> dict[str, np.ndarray]:
        """Return the own values for one rank, from the values that other ranks have saved.

        ``saved`` contains the own values of ``ranks`` ranks in the checkpoint. The result has the
        keys and sizes of ``template``, this rank's current own values.
        """
        variables = self._own_variables(accumulated=True, optimizers=True)
        part = {}
        for key, like in template.items():
            values = [saved[f"rank/{r}/{key}"] for r in range(ranks) if f"rank/{r}/{key}" in saved]
            if not values and key.startswith(_OPTIMIZER):
                part[key] = like  # saved in a different mode, so the shared optimizer is restored
            elif not values or (key.startswith(_RANDOM) and rank >= len(values)):
                # Nothing was accumulated, or this rank is new and keeps its random state.
                part[key] = np.zeros_like(like)
            elif len(values) == size:
                part[key] = values[rank]
            else:
                part[key] = _share(values, _rule(key, variables.get(key)), rank)
            if part[key].dtype != like.dtype and _is_convertible(part[key].dtype, like.dtype):
                part[key] = part[key].astype(like.dtype)
            if part[key].nbytes != like.nbytes:
                raise CheckpointError(
                    f"{_OTHER_MODEL}: {key} must be {like.dtype} {like.shape}, got "
                    f"{part[key].dtype} {part[key].shape}. {_REMEDY}"
                )
        return part


def unsent_of(saved: Collection[str]) -> list[int]:
    """Return the indices of the variables for which a checkpoint contains residuals."""
    prefix = "rank/0/unsent/"
    return [int(key.removeprefix(prefix)) for key in saved if key.startswith(prefix)]


def ignored_random_states(saved: Collection[str]) -> list[str]:
    """Return the names of the random states in a checkpoint that this backend doesn't have."""
    prefix = f"rank/0/{_RANDOM}"
    names = {key.removeprefix(prefix) for key in saved if key.startswith(prefix)}
    return sorted(names - random_state().keys())


def _is_convertible(saved: np.dtype, current: np.dtype) -> bool:
    """Return whether a saved value fits a variable. Backends use different types of integers."""
    return saved == current or (saved.kind in "iu" and current.kind in "iu")


def _numbered(kinds: Mapping[str, Sequence[Any]], without: Collection[Any] = ()) -> dict[str, Any]:
    excluded = set(map(id, without))
    return {
        f"{kind}/{number:04d}": variable
        for kind, variables in kinds.items()
        for number, variable in enumerate(variables)
        if id(variable) not in excluded
    }


def _rule(key: str, variable: Any) -> _Rule:
    kind = key.split("/")[0]
    if kind in ("statistics", "optimizer"):
        # Integers can't be averaged.
        return "chief" if dtype_of(variable).kind in "iub" else "average"
    if kind == "metrics":
        return reduction_of_metric(variable) or "chief"
    return _RULES[kind]


def _share(values: Sequence[np.ndarray], rule: _Rule, rank: int) -> np.ndarray:
    """Return the value of ``rank``, from values that were saved by a different number of ranks."""
    first = values[0]
    if rule == "sum":
        total = np.sum(values, axis=0, dtype=first.dtype)
        return total if rank == 0 else np.zeros_like(first)
    if rule == "average":
        return np.mean([np.asarray(k, np.float64) for k in values], axis=0).astype(first.dtype)
    if rule == "seed":
        return values[rank] if rank < len(values) else seed_of_rank(first, rank)
    if rule == "reset":
        return np.zeros_like(first)
    return values[min(rank, len(values) - 1)]
