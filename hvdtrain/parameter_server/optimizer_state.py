"""The state of an optimizer whose variables are held in shards: taken apart, and put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.errors import CheckpointError, ModelError
from hvdtrain.parameter_server.shard_optimizer import accumulated_steps, plain_optimizer
from hvdtrain.parameter_server.sharding import Shard, VariableSlice
from hvdtrain.private_api.keras import (
    NOT_STATE,
    accumulated_gradients,
    own_trainable_variables,
    rate_of,
)

__all__ = [
    "AVERAGES",
    "assign_state",
    "cut_state",
    "gather_state",
    "put_states",
    "read_state",
    "take_states",
]

_ITERATIONS = "iterations"
# The moving averages of the weights, where the optimizer has use_ema.
AVERAGES = "model_variables_moving_average"

# Variables of an optimizer by key; with the piece of a shard that they belong to, or None.
_Entries = dict[str, tuple[keras.Variable, VariableSlice | None]]


def read_state(optimizer: Any, shard: Shard) -> dict[str, np.ndarray]:
    """Returns copies of the state of an optimizer that is built on the pieces of ``shard``.

    Keys, their order, shapes and types are those of ``cut_state``.
    """
    return {
        key: _scalar(variable) if piece is None else _value(variable)
        for key, (variable, piece) in _entries(optimizer, shard, range(len(shard.pieces))).items()
    }


def assign_state(optimizer: Any, shard: Shard, values: Mapping[str, np.ndarray]) -> None:
    """Give an optimizer the state that ``read_state`` returned.

    Raises:
        CheckpointError: ``values`` are of another optimizer or shard.
    """
    entries = _entries(optimizer, shard, range(len(shard.pieces)))
    for key, (variable, _) in entries.items():
        _check(key, values, tuple(variable.shape))
    for key, (variable, _) in entries.items():
        variable.assign(values[key])


def cut_state(model_optimizer: Any, shard: Shard) -> dict[str, np.ndarray]:
    """Returns a shard's part of the state of a whole model's optimizer.

    Raises:
        ModelError: The optimizer is not built, or its state can't be taken apart.
    """
    plain, variables = _built(model_optimizer)
    state = {
        key: _scalar(variable) if piece is None else _part(_value(variable), piece, variables)
        for key, (variable, piece) in _entries_of_model(plain, shard).items()
    }
    state[_ITERATIONS] //= accumulated_steps(plain)
    return state


def gather_state(
    model_optimizer: Any,
    shards: Sequence[Shard],
    states: Sequence[Mapping[str, np.ndarray]],
    *,
    only: str | None = None,
) -> None:
    """Assign what all shards have to the optimizer of the whole model.

    What concerns all variables is taken from the first. ``only`` assigns nothing but these slots,
    such as ``momentums``.

    Raises:
        CheckpointError: The states are of another optimizer or of other shards.
        ModelError: The optimizer is not built or has no slots ``only``, or its state can't be put
            together.
    """
    plain, variables = _built(model_optimizer)
    parts: dict[int, tuple[keras.Variable, list[tuple[VariableSlice | None, np.ndarray]]]] = {}
    for shard, values in zip(shards, states):
        for key, (variable, piece) in _entries_of_model(plain, shard).items():
            if only is not None and not key.startswith(f"{only}/"):
                continue
            if piece is None and shard is not shards[0]:
                continue
            value = _check(key, values, _part_shape(variable, piece, variables))
            if key == _ITERATIONS:
                # Beside what the servers count there are gradients that wait for those of more
                # steps.
                steps = accumulated_steps(plain)
                value = value * steps + int(_value(variable)) % steps
            parts.setdefault(id(variable), (variable, []))[1].append((piece, value))
    if only is not None and not parts:
        raise ModelError(
            f"The servers' {only} can't be given to {type(plain).__name__}, which has no "
            f"attribute _{only} with an entry for each variable. Use a version of Keras that "
            "hvdtrain was tested with, or an optimizer that keeps them."
        )
    # One copy at a time: an optimizer may keep several times as much as the model has.
    for variable, pieces in parts.values():
        whole = _value(variable)
        for piece, value in pieces:
            _part(whole, piece, variables)[...] = value
        variable.assign(whole)


def take_states(optimizer: Any, shards: Sequence[Shard]) -> list[np.ndarray]:
    """Returns the state of a whole model's optimizer as the flat buffers of all shards."""
    return [join_bytes(cut_state(optimizer, shard)) for shard in shards]


def put_states(
    optimizer: Any,
    shards: Sequence[Shard],
    states: Sequence[np.ndarray],
    *,
    only: str | None = None,
) -> None:
    """Give a whole model's optimizer the state that all shards have, from flat buffers.

    A learning rate that can be set stays: servers have what this rank told them last. ``only`` is
    that of ``gather_state``.
    """
    rate = rate_of(plain_optimizer(optimizer))
    before = rate.numpy() if isinstance(rate, keras.Variable) else None
    cut = [split_bytes(state, cut_state(optimizer, shard)) for shard, state in zip(shards, states)]
    gather_state(optimizer, shards, cut, only=only)
    if before is not None:
        rate.assign(before)


def _entries_of_model(plain: Any, shard: Shard) -> _Entries:
    return _entries(plain, shard, [piece.variable for piece in shard.pieces])


def _entries(optimizer: Any, shard: Shard, numbers: Sequence[int]) -> _Entries:
    """Returns the variables of a plain optimizer that concern a shard, in one order everywhere.

    Those that concern all variables, such as ``iterations``, come by their attribute without
    leading underscores, with None. Those of each piece, such as its momentum, come with the piece;
    ``numbers`` says which of the optimizer's variables a piece is, or is of.

    Raises:
        ModelError: The optimizer has variables that belong neither to all nor to each of the
            model's.
    """
    count = len(own_trainable_variables(optimizer))
    mine = {id(variable) for variable in optimizer.variables}
    known = {id(v) for v in accumulated_gradients(optimizer)}
    found: _Entries = {}
    for attribute, value in vars(optimizer).items():
        name = attribute.lstrip("_")
        if attribute in NOT_STATE:
            continue
        if isinstance(value, keras.Variable) and id(value) in mine and not tuple(value.shape):
            found[name] = value, None
            known.add(id(value))
        elif isinstance(value, (list, tuple)) and len(value) == count:
            ids = {id(entry) for entry in value if entry is not None}
            if ids and ids <= mine:
                known |= ids
                for number, piece in zip(numbers, shard.pieces):
                    if value[number] is not None:
                        found[f"{name}/{piece.variable:04d}/{piece.start}"] = value[number], piece
    unknown = [v.path for v in optimizer.variables if id(v) not in known]
    if unknown:
        raise ModelError(
            f"Can't tell to which variables of the model {', '.join(unknown)} of "
            f"{type(optimizer).__name__} belong. For parameter servers an optimizer is expected "
            "to keep its state in attributes that are scalars, or lists with an entry for each "
            "variable. Use one of Keras' own, or train without parameter servers."
        )
    return dict(sorted(found.items()))


def _built(optimizer: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the optimizer that updates variables, and these."""
    plain = plain_optimizer(optimizer)
    if not plain.built:
        raise ModelError(
            f"The model's {type(plain).__name__} has no state yet. Call "
            "optimizer.build(model.trainable_variables) before."
        )
    return plain, own_trainable_variables(plain)


def _is_whole(piece: VariableSlice, variables: Sequence[Any]) -> bool:
    return piece.stop - piece.start == math.prod(variables[piece.variable].shape)


def _part(whole: np.ndarray, piece: VariableSlice | None, variables: Sequence[Any]) -> np.ndarray:
    """Returns what belongs to ``piece`` of a variable's state, as a view; for None all of it."""
    if piece is None or _is_whole(piece, variables):
        return whole  # which needn't have the variable's shape
    return whole.reshape(-1)[piece.start : piece.stop].reshape(piece.shape)


def _part_shape(
    slot: keras.Variable, piece: VariableSlice | None, variables: Sequence[Any]
) -> tuple[int, ...]:
    """Returns the shape of that ``_part`` of a slot, which is not copied for it."""
    if piece is None or _is_whole(piece, variables):
        return tuple(slot.shape)
    return piece.shape


def _value(variable: Any) -> np.ndarray:
    """Returns a copy that may be written to."""
    return np.array(variable.value.numpy())


def _scalar(variable: Any) -> np.ndarray:
    """Returns a copy in a type that doesn't depend on which variables a shard has."""
    value = _value(variable)
    return value.astype(np.int64 if value.dtype.kind in "iu" else np.float64)


def _check(key: str, values: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    value = values.get(key)
    if value is None or value.shape != shape:
        held = "nothing" if value is None else f"shape {value.shape}"
        raise CheckpointError(
            f"The state of an optimizer is of another one, or of other shards: for {key} expected "
            f"shape {shape}, found {held}. Use the model and optimizer that it was taken from, "
            "and the same number of parameter servers, or put it together with gather_state."
        )
    return value
