"""The state of a training as arrays: values shared by all ranks, and each rank's own values.

Weights and the optimizer are equal on all ranks; the chief's are saved. Each rank's own values are
saved for every rank: random states, statistics that layers track on their own batches (equal only
at the end of an epoch), metrics and accumulated gradients between two updates, states of recurrent
layers, the number of samples, and unsent parts of gradients (``--compression``). With
``--mode local-sgd`` these include the state of the rank's optimizer. The chief's optimizer is saved
as a shared value as well, so that other modes can resume from it, and this one from theirs.

With the same number of ranks, every rank gets its own values back. With another number there is a
rule for each kind: sums go to the chief, averages to all, random states to the ranks that had one;
recurrent states, whose samples are on other ranks now, are reset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.errors import CheckpointError, RanksLostError
from hvdtrain.gradients.error_feedback import ErrorFeedback
from hvdtrain.keras.joint_results import reduction_of_metric
from hvdtrain.keras.model_parts import (
    layer_statistics,
    optimizer_variables,
    plain_optimizers_of,
    recurrent_states,
)
from hvdtrain.keras.model_sync import broadcast_model
from hvdtrain.keras.moving_statistics import row_weights_of, steps_with_rows_of
from hvdtrain.keras.optimizer_patch import accumulator_variables
from hvdtrain.keras.rank_random import seed_generators, seed_of_rank
from hvdtrain.keras.saving.random_state import random_state, restore_random_state
from hvdtrain.private_api.keras import iterations_of, learning_rate_of

__all__ = ["TrainingState", "unsent_of"]

# The rule for each kind of own values with another number of ranks; for other kinds the variable
# decides.
_Rule = Literal["sum", "average", "chief", "seed", "anew"]
_RULES: dict[str, _Rule] = {
    "seeds": "seed",
    "states": "anew",
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
_OTHER_MODEL = "The checkpoint is of another model or optimizer"
_REMEDY = "Resume with the model that was saved, or start over in another directory."


class TrainingState:
    """Everything that ``fit`` changes in a model, as arrays.

    Args:
        samples: Counts the samples that this rank has trained on.
        own_optimizers: Whether each rank updates its own weights.
        outer: Variables of the outer optimizer, equal on all ranks.
        feedback: Keeps the unsent parts of gradients.
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
        """Return copies of the shared values; the next call overwrites them."""
        copies = {}
        for place, variable in self._shared_variables().items():
            key = f"{place}/{variable.path}"
            value = _view(variable)
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = self._buffers[key] = np.empty(value.shape, value.dtype)
            np.copyto(buffer, value)
            copies[key] = buffer
        return copies

    def copy_own(self) -> dict[str, np.ndarray]:
        """Return copies of this rank's own values that updates don't change; for ``gather_own``."""
        values = self._own_values(accumulated=False, optimizers=False)
        return {key: array.copy() for key, array in values.items()}

    def gather_own(self, earlier: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Gather each rank's own values on the chief, under ``rank/<r>/``; collective.

        The values of a rank that is lost meanwhile are missing; ``Membership.renew`` reports it.
        They include metrics, so call this before these are reset.

        Args:
            earlier: Values from ``copy_own``, which replace those that have changed since.
        """
        mine = {**self._own_values(accumulated=self.accumulates), **(earlier or {})}
        collectives = self.collectives
        rows = join_bytes(mine)[np.newaxis]
        to_chief = [1] + [0] * (collectives.size - 1)
        received, _ = collectives.alltoall(rows, to_chief, name="what ranks have of their own")
        return {
            f"rank/{rank}/{key}": array
            for rank, row in enumerate(received)
            for key, array in split_bytes(row, mine).items()
        }

    def check(self, saved: Mapping[str, np.ndarray]) -> None:
        """Check that arrays of an earlier ``shared`` belong to this model and optimizer.

        Raises:
            CheckpointError: They don't; names the variable.
        """
        found = self._by_place(saved)
        for place, variable in self._shared_variables().items():
            if place.startswith(_OUTER) and place not in found:
                continue  # it was another mode's
            expected = f"{_numpy_dtype(variable).name} {tuple(variable.shape)}"
            array = found.pop(place, None)
            held = "nothing" if array is None else f"{array.dtype.name} {array.shape}"
            if held != expected:
                raise CheckpointError(
                    f"{_OTHER_MODEL}: for {variable.path} ({place}) expected {expected}, found "
                    f"{held}. {_REMEDY}"
                )
        if found:
            raise CheckpointError(
                f"{_OTHER_MODEL}: it holds {len(found)} more variables than this one has, the "
                f"first is {next(iter(found))}. {_REMEDY}"
            )

    def allocate_residuals(self, variables: Sequence[int]) -> None:
        """Expect unsent parts of the gradients of these variables; before ``restore_own``.

        Args:
            variables: Their numbers, from ``unsent_of``.
        """
        if self._feedback is not None:
            for number in variables:
                self._feedback.keep(self.model.trainable_variables[number])

    @property
    def keeps_unsent(self) -> bool:
        """Whether parts of gradients are kept for the next step instead of being sent."""
        return self._feedback is not None

    def restore_shared(self, saved: Mapping[str, np.ndarray] | None) -> None:
        """Restore weights and optimizer from the chief's arrays on all ranks; collective.

        Args:
            saved: On the chief the arrays that ``shared`` returned, elsewhere None.
        """
        if saved is not None:
            found = self._by_place(saved)
            for place, variable in self._shared_variables().items():
                begins = place.startswith(_OUTER) and place not in found
                variable.assign(np.zeros_like(_view(variable)) if begins else found[place])
        broadcast_model(self.model, self.collectives, self._outer)

    def restore_own(self, saved: Mapping[str, np.ndarray] | None, ranks: int) -> None:
        """Restore each rank's own values, or its part of them; collective.

        Args:
            saved: On the chief the arrays that ``gather_own`` returned, elsewhere None.
            ranks: How many ranks there were.
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
        received, _ = collectives.alltoall(rows, splits, name="what ranks had of their own")
        if not len(received):
            raise RanksLostError(
                "The rank that reads the checkpoint was lost. Start the job again."
            )
        self._take_own(split_bytes(received[0], template))

    def restore_part(
        self, saved: Mapping[str, np.ndarray], ranks: int, *, rank: int, size: int
    ) -> None:
        """Restore this rank's part of ``saved`` as ``restore_own`` does, without communication."""
        template = self._own_values(accumulated=True)
        self._take_own(self._part(saved, template, ranks, rank, size))

    @property
    def accumulates(self) -> bool:
        """Whether accumulated gradients wait for an update."""
        return any(
            (steps := optimizer.gradient_accumulation_steps)
            and int(iterations_of(optimizer).numpy()) % steps
            for optimizer in plain_optimizers_of(self.model)
        )

    def _take_own(self, mine: Mapping[str, np.ndarray]) -> None:
        for key, variable in self._own_variables(accumulated=True, optimizers=True).items():
            variable.assign(mine[key].astype(_numpy_dtype(variable)))
        prefix = len(_RANDOM)
        random = {key[prefix:]: a for key, a in mine.items() if key.startswith(_RANDOM)}
        if any(array.any() for array in random.values()):
            restore_random_state(random)

    def _shared_variables(self) -> dict[str, Any]:
        """List shared variables by kind and number: names differ from model to model."""
        own = self._own_variables(accumulated=True, optimizers=False).values()
        optimizers = optimizer_variables(self.model)
        kinds = {"weights": self.model.variables, "optimizer": optimizers, "outer": self._outer}
        return _numbered(kinds, without=own)

    def _by_place(self, saved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Select the arrays of this training, by keys without names, which are only for people."""
        kinds = ("weights", "optimizer", *(("outer",) if self._outer else ()))
        return {
            "/".join(key.split("/")[:2]): array
            for key, array in saved.items()
            if key.split("/")[0] in kinds
        }

    def _own_variables(self, *, accumulated: bool, optimizers: bool) -> dict[str, Any]:
        """List the variables that differ by rank, by kind and number.

        Args:
            accumulated: Whether to include gradients that wait for an update.
            optimizers: Whether to include values that only updates change: unsent parts of
                gradients, and optimizers if each rank updates its own weights.
        """
        model = self.model
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
        found = {**_numbered(kinds), "samples": self._samples}
        if optimizers and self._feedback is not None:
            found.update(self._feedback.arrays(model.trainable_variables))
        if optimizers and self._own_optimizers:
            leaves = plain_optimizers_of(model)
            # Rates are equal, and may have to follow the number of ranks.
            alike = [
                v for leaf in leaves for v in (*accumulator_variables(leaf), learning_rate_of(leaf))
            ]
            found.update(_numbered({"optimizer": optimizer_variables(model)}, without=alike))
        return found

    def _own_values(self, *, accumulated: bool, optimizers: bool = True) -> dict[str, np.ndarray]:
        """Return this rank's own values as arrays; the arguments are as for ``_own_variables``."""
        variables = self._own_variables(accumulated=accumulated, optimizers=optimizers)
        values = {key: _view(variable) for key, variable in variables.items()}
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
        """Return the part of ``rank`` among ``size`` in the values of ``ranks`` ranks."""
        variables = self._own_variables(accumulated=True, optimizers=True)
        part = {}
        for key, like in template.items():
            kept = [saved[f"rank/{r}/{key}"] for r in range(ranks) if f"rank/{r}/{key}" in saved]
            if not kept and key.startswith(_OPTIMIZER):
                part[key] = like  # saved by another mode: the shared one is restored
            elif not kept:
                part[key] = np.zeros_like(like)  # nothing had been accumulated
            elif key.startswith(_RANDOM) and rank >= len(kept):
                part[key] = np.zeros_like(like)  # a new rank keeps its own
            elif len(kept) == size:
                part[key] = kept[rank]
            else:
                part[key] = _share(kept, _rule(key, variables.get(key)), rank)
            if part[key].nbytes != like.nbytes:
                raise CheckpointError(
                    f"{_OTHER_MODEL}: for {key} expected {like.dtype} {like.shape}, found "
                    f"{part[key].dtype} {part[key].shape}. {_REMEDY}"
                )
        return part


def unsent_of(saved: Collection[str]) -> list[int]:
    """Return the numbers of variables with unsent parts of gradients in ``saved``."""
    begin = "rank/0/unsent/"
    return [int(key.removeprefix(begin)) for key in saved if key.startswith(begin)]


def _numbered(kinds: Mapping[str, Sequence[Any]], without: Collection[Any] = ()) -> dict[str, Any]:
    apart = set(map(id, without))
    return {
        f"{kind}/{number:04d}": variable
        for kind, variables in kinds.items()
        for number, variable in enumerate(variables)
        if id(variable) not in apart
    }


def _rule(key: str, variable: Any) -> _Rule:
    kind = key.split("/")[0]
    if kind in ("statistics", "optimizer"):
        # Integers can't be averaged.
        return "chief" if _numpy_dtype(variable).kind in "iub" else "average"
    if kind == "metrics":
        return reduction_of_metric(variable) or "chief"
    return _RULES[kind]


def _share(kept: Sequence[np.ndarray], rule: _Rule, rank: int) -> np.ndarray:
    """Return the value for ``rank`` if another number of ranks had ``kept``."""
    first = kept[0]
    if rule == "sum":
        total = np.sum(kept, axis=0, dtype=first.dtype)
        return total if rank == 0 else np.zeros_like(first)
    if rule == "average":
        return np.mean([np.asarray(k, np.float64) for k in kept], axis=0).astype(first.dtype)
    if rule == "seed":
        return kept[rank] if rank < len(kept) else seed_of_rank(first, rank)
    if rule == "anew":
        return np.zeros_like(first)
    return kept[min(rank, len(kept) - 1)]


def _numpy_dtype(variable: Any) -> np.dtype:
    return np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)


def _view(variable: Any) -> np.ndarray:
    """Return the variable's value, without a copy if TensorFlow shares its memory."""
    value = variable if isinstance(variable, tf.Variable) else variable.value
    tensor = value.read_value() if isinstance(value, tf.Variable) else value
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, ValueError):
        # Python's buffer protocol lacks bfloat16 and the like.
        return np.asarray(tensor.numpy())
