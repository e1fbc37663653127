"""The state of an optimizer whose variables are held in shards: taken apart, and put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.errors import CheckpointError, ModelError
from hvdtrain.parameter_server.shard_optimizer import accumulated_steps, plain_optimizer
from hvdtrain.parameter_server.sharding import Shard, VariableSlice

__all__ = [
    "assign_state",
    "cut_state",
    "gather_state",
    "put_averages",
    "put_states",
    "read_state",
    "take_states",
]

# Variables of the model, a list of everything, and what only workers have.
_NOT_STATE = {"_trainable_variables", "_variables", "_accumulated_gradients"}
_ITERATIONS = "iterations"
# The moving averages of the weights, where the optimizer has use_ema.
_AVERAGES = "model_variables_moving_average"


class _State(NamedTuple):
    """An optimizer's variables by the attribute that holds them, without leading underscores.

    Attributes:
        scalars: Those that concern all variables, such as ``iterations``.
        slots: Those of each variable, such as ``momentums``; None for variables that have none.
    """

    scalars: dict[str, keras.Variable]
    slots: dict[str, Sequence[keras.Variable | None]]


def read_state(optimizer: Any, shard: Shard) -> dict[str, np.ndarray]:
    """The state of an optimizer that is built on the pieces of ``shard``, as copies.

    Keys, their order, shapes and types are those of ``cut_state``.
    """
    state = _state_of(optimizer, len(shard.pieces))
    return {
        key: _scalar(variable) if key in state.scalars else _value(variable)
        for key, variable in sorted(_by_key(state, shard).items())
    }


def assign_state(optimizer: Any, shard: Shard, values: Mapping[str, np.ndarray]) -> None:
    """The way back from ``read_state``.

    Raises:
        CheckpointError: ``values`` are of another optimizer or shard.
    """
    expected = _by_key(_state_of(optimizer, len(shard.pieces)), shard)
    for key, variable in expected.items():
        _check(key, values, tuple(variable.shape))
    for key, variable in expected.items():
        variable.assign(values[key])


def cut_state(model_optimizer: Any, shard: Shard) -> dict[str, np.ndarray]:
    """A shard's part of the state of a whole model's optimizer.

    Raises:
        ModelError: The optimizer is not built, or its state can't be taken apart.
    """
    plain, variables = _built(model_optimizer)
    state = _state_of(plain, len(variables))
    found = {key: _scalar(variable) for key, variable in state.scalars.items()}
    found[_ITERATIONS] //= accumulated_steps(plain)
    for name, slots in state.slots.items():
        for piece in shard.pieces:
            slot = slots[piece.variable]
            if slot is not None:
                found[_key(name, piece)] = _part(_value(slot), piece, variables)
    return dict(sorted(found.items()))


def gather_state(
    model_optimizer: Any,
    shards: Sequence[Shard],
    states: Sequence[Mapping[str, np.ndarray]],
    *,
    only: str | None = None,
) -> None:
    """Assign what all shards have to the optimizer of the whole model.

    Args:
        model_optimizer: Built on the model's variables.
        shards: Those of all servers.
        states: The state of each shard; what concerns all variables is taken from the first.
        only: Assign nothing but these slots, such as ``momentums``; None for everything.

    Raises:
        CheckpointError: The states are of another optimizer or of other shards.
        ModelError: The optimizer is not built, or its state can't be put together.
    """
    plain, variables = _built(model_optimizer)
    state = _state_of(plain, len(variables))
    if only is not None:
        state = _State({}, {only: state.slots[only]})
    for key, variable in state.scalars.items():
        value = np.asarray(_check(key, states[0], ()))
        if key == _ITERATIONS:
            # Beside what the servers count there are gradients that wait for those of more steps.
            steps = accumulated_steps(plain)
            value = value * steps + int(_value(variable)) % steps
        variable.assign(value)
    for name, slots in state.slots.items():
        wholes = {i: _value(slot) for i, slot in enumerate(slots) if slot is not None}
        for shard, values in zip(shards, states):
            for piece in shard.pieces:
                if piece.variable in wholes:
                    place = _part(wholes[piece.variable], piece, variables)
                    place[...] = _check(_key(name, piece), values, place.shape)
        for i, whole in wholes.items():
            slots[i].assign(whole)  # type: ignore[union-attr]


def take_states(optimizer: Any, shards: Sequence[Shard]) -> list[np.ndarray]:
    """The state of a whole model's optimizer as the flat buffers of all shards."""
    return [join_bytes(cut_state(optimizer, shard)) for shard in shards]


def put_states(optimizer: Any, shards: Sequence[Shard], states: Sequence[np.ndarray]) -> None:
    """Give a whole model's optimizer the state that all shards have, from flat buffers.

    A learning rate that can be set stays: servers have what this rank told them last.
    """
    rate = plain_optimizer(optimizer)._learning_rate
    before = rate.numpy() if isinstance(rate, keras.Variable) else None
    gather_state(optimizer, shards, _split(optimizer, shards, states))
    if before is not None:
        rate.assign(before)


def put_averages(optimizer: Any, shards: Sequence[Shard], states: Sequence[np.ndarray]) -> None:
    """Give a whole model's optimizer no more of that than the moving averages of the weights."""
    gather_state(optimizer, shards, _split(optimizer, shards, states), only=_AVERAGES)


def _split(
    optimizer: Any, shards: Sequence[Shard], states: Sequence[np.ndarray]
) -> list[dict[str, np.ndarray]]:
    return [split_bytes(state, cut_state(optimizer, shard)) for shard, state in zip(shards, states)]


def _state_of(optimizer: Any, count: int) -> _State:
    """Tell the variables of an optimizer that is built on ``count`` others apart."""
    mine = {id(variable) for variable in optimizer.variables}
    accumulated = {id(v) for v in getattr(optimizer, "_accumulated_gradients", ())}
    state = _State({}, {})
    known = set(accumulated)
    for attribute, value in vars(optimizer).items():
        name = attribute.lstrip("_")
        if attribute in _NOT_STATE:
            continue
        if isinstance(value, keras.Variable) and id(value) in mine and not tuple(value.shape):
            state.scalars[name] = value
            known.add(id(value))
        elif isinstance(value, (list, tuple)) and len(value) == count:
            ids = {id(entry) for entry in value if entry is not None}
            if ids and ids <= mine:
                state.slots[name] = value
                known |= ids
    unknown = [v.path for v in optimizer.variables if id(v) not in known]
    if unknown:
        raise ModelError(
            f"Can't tell to which variables of the model {', '.join(unknown)} of "
            f"{type(optimizer).__name__} belong. For parameter servers an optimizer is expected "
            "to keep its state in attributes that are scalars, or lists with an entry for each "
            "variable. Use one of Keras' own, or train without parameter servers."
        )
    return state


def _by_key(state: _State, shard: Shard) -> dict[str, keras.Variable]:
    """The variables of an optimizer that is built on the pieces of ``shard``."""
    found = dict(state.scalars)
    for name, slots in state.slots.items():
        for piece, slot in zip(shard.pieces, slots):
            if slot is not None:
                found[_key(name, piece)] = slot
    return found


def _built(optimizer: Any) -> tuple[Any, Sequence[Any]]:
    """The optimizer that updates variables, and these."""
    plain = plain_optimizer(optimizer)
    if not plain.built:
        raise ModelError(
            f"The model's {type(plain).__name__} has no state yet. Call "
            "optimizer.build(model.trainable_variables) before."
        )
    return plain, plain._trainable_variables


def _part(whole: np.ndarray, piece: VariableSlice, variables: Sequence[Any]) -> np.ndarray:
    """What belongs to ``piece`` of a variable's state, as a view."""
    if piece.stop - piece.start == math.prod(variables[piece.variable].shape):
        return whole  # which needn't have the variable's shape
    return whole.reshape(-1)[piece.start : piece.stop].reshape(piece.shape)


def _key(name: str, piece: VariableSlice) -> str:
    return f"{name}/{piece.variable:04d}/{piece.start}"


def _value(variable: Any) -> np.ndarray:
    """A copy that may be written to."""
    return np.array(variable.value.numpy())


def _scalar(variable: Any) -> np.ndarray:
    """In a type that doesn't depend on which variables a shard has, as that of some does."""
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
