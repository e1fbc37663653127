"""The optimizer that a parameter server uses for its shard of the variables.

Functions check whether a model's optimizer can be divided among servers, copy the optimizer for a
shard, and read and assign its state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.errors import ModelError
from hvdtrain.parameter_server.sharding import Shard, VariableSlice
from hvdtrain.private_api.keras import (
    NOT_STATE,
    accumulated_gradients,
    has_weight_decay,
    iterations_of,
    learning_rate_of,
    moving_averages,
    own_trainable_variables,
)

__all__ = [
    "assign_state",
    "check_optimizer",
    "is_elementwise",
    "optimizer_for_pieces",
    "pack_states",
    "plain_optimizer",
    "read_state",
    "split_state",
    "unpack_states",
    "unsplittable_variables",
]

# In these optimizers, an element's update depends only on the step and on the element's own
# gradient, value and state, and no gradient is kept. Their subclasses are not included, because
# they may do anything.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta",
                "Ftrl", "Lion")  # fmt: skip

_ITERATIONS = "iterations"

# An optimizer's variables by key, each with the piece that it belongs to or None.
_Entries = dict[str, tuple[keras.Variable, VariableSlice | None]]


class _ShardOptimizer:
    """Mixin for an optimizer on a server. Its learning rate schedule counts the workers' steps.

    The mixin also skips the code with which Keras wraps gradients for tf.distribute. This code
    would make TensorFlow keep every traced step and its variables forever.
    """

    _hvdtrain_steps = 1

    def _get_current_learning_rate(self) -> Any:
        schedule = learning_rate_of(self)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            # Keras' schedules also count steps that only accumulate gradients.
            steps = self._hvdtrain_steps
            return schedule(iterations_of(self) * steps + (steps - 1))
        return super()._get_current_learning_rate()  # type: ignore[misc]

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars


def check_optimizer(optimizer: Any, servers: int) -> None:
    """Raise ModelError if parameter servers can't apply gradients as ``optimizer`` would."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}; replace "
            "optimizers of tf_keras or keras.optimizers.legacy with those of keras.optimizers."
        )
    plain = plain_optimizer(optimizer)
    if isinstance(getattr(plain, "optimizers", None), (list, tuple)):
        raise ModelError(
            f"Parameter servers need a single optimizer, got {type(plain).__name__}, which has one "
            "for each group of variables. Compile the model with one optimizer, or train without "
            "parameter servers."
        )
    if plain.global_clipnorm and servers > 1:
        raise ModelError(
            f"global_clipnorm needs one parameter server, got {servers} (global_clipnorm="
            f"{plain.global_clipnorm}), because each of several servers has only a part of the "
            "gradients. Use clipnorm or clipvalue, or one parameter server."
        )
    if plain.use_ema and (steps := plain.gradient_accumulation_steps):
        raise ModelError(
            "Parameter servers don't support use_ema=True with gradient_accumulation_steps, got "
            f"{steps}: Keras updates the averages in each step, but servers only in each update. "
            "Leave out one of the two arguments, or leave out --mode."
        )


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer itself, or the inner optimizer of a ``LossScaleOptimizer``."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _accumulated_steps(optimizer: Any) -> int:
    """Return how many steps of a worker lead to one update."""
    return int(plain_optimizer(optimizer).gradient_accumulation_steps or 1)


def is_elementwise(optimizer: Any) -> bool:
    """Return whether updates of elements don't depend on others or on older gradients."""
    kind = type(plain_optimizer(optimizer))
    return kind in {getattr(keras.optimizers, name) for name in _ELEMENTWISE}


def unsplittable_variables(optimizer: Any, variables: Sequence[Any]) -> set[int]:
    """Return the indices of the variables that must be on one server as a whole.

    The update of such a variable mixes several elements of it. This is the case if the optimizer is
    not elementwise, if it has a ``clipnorm``, or if the variable has a constraint.
    """
    if not is_elementwise(optimizer) or plain_optimizer(optimizer).clipnorm:
        return set(range(len(variables)))
    return {i for i, variable in enumerate(variables) if variable.constraint is not None}


def optimizer_for_pieces(optimizer: Any, pieces: Sequence[Any], wholes: Sequence[Any]) -> Any:
    """Return a copy of ``optimizer`` for a shard.

    The copy is built on ``pieces``, which are parts of the variables ``wholes``. It expects
    gradients that are already accumulated and unscaled.

    Raises:
        ModelError: If the optimizer can't be created from its configuration.
    """
    plain = plain_optimizer(optimizer)
    kind = type(plain)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own_kind: Any = type(kind.__name__, (_ShardOptimizer, kind), names)
    try:
        with warnings.catch_warnings():
            # A function that computes the learning rate is passed on below without serialization.
            warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
            config = plain.get_config()
        for done_before in ("gradient_accumulation_steps", "loss_scale_factor"):
            if done_before in config:
                config[done_before] = None
        if not isinstance(learning_rate_of(plain), keras.Variable):
            config["learning_rate"] = learning_rate_of(plain)
        own = own_kind.from_config(config)
    except Exception as error:
        raise ModelError(
            f"A parameter server could not create its {kind.__name__}: expected get_config() to "
            f"have the arguments of its constructor, got {error!r}. Complete its get_config()."
        ) from error
    object.__setattr__(own, "_hvdtrain_steps", _accumulated_steps(optimizer))
    # The configuration lacks exclusions from weight decay, because they depend on the variables.
    excluded = [p for p, whole in zip(pieces, wholes) if not has_weight_decay(plain, whole.value)]
    if excluded:
        own.exclude_from_weight_decay(var_list=excluded)
    own.build(list(pieces))
    return own


def read_state(
    optimizer: Any, shard: Shard, *, averages_only: bool = False
) -> dict[str, np.ndarray]:
    """Return copies of the state of an optimizer that is built on the pieces of ``shard``.

    The result has the same keys, order, shapes and dtypes as the result of ``split_state``.
    """
    entries = _entries(optimizer, shard, range(len(shard.pieces)), averages_only=averages_only)
    return {
        key: _scalar(variable) if piece is None else _value(variable)
        for key, (variable, piece) in entries.items()
    }


def assign_state(optimizer: Any, shard: Shard, values: Mapping[str, np.ndarray]) -> None:
    """Assign a state, which ``read_state`` or ``split_state`` returned, to an optimizer."""
    for key, (variable, _) in _entries(optimizer, shard, range(len(shard.pieces))).items():
        variable.assign(values[key])


def split_state(
    model_optimizer: Any, shard: Shard, *, averages_only: bool = False
) -> dict[str, np.ndarray]:
    """Return the part of the state of a model's optimizer that belongs to a shard.

    Raises:
        ModelError: If the optimizer is not built, or if its state can't be split.
    """
    plain, variables = _built(model_optimizer)
    state = {
        key: _scalar(variable) if piece is None else _part(_value(variable), piece, variables)
        for key, (variable, piece) in _entries_of_model(plain, shard, averages_only).items()
    }
    if not averages_only:
        state[_ITERATIONS] //= _accumulated_steps(plain)
    return state


def pack_states(
    model_optimizer: Any, shards: Sequence[Shard], *, averages_only: bool = False
) -> list[np.ndarray]:
    """Return the optimizer's state, or only averages of weights, as a buffer per shard."""
    return [
        join_bytes(split_state(model_optimizer, shard, averages_only=averages_only))
        for shard in shards
    ]


def unpack_states(
    model_optimizer: Any,
    shards: Sequence[Shard],
    states: Sequence[np.ndarray],
    *,
    averages_only: bool = False,
) -> None:
    """Assign the states of all shards, which are flat buffers, to the model's optimizer.

    State that belongs to no variable is taken from the first shard. If the learning rate can be
    set, it is not changed, because the servers' learning rate is older.
    """
    plain, variables = _built(model_optimizer)
    parts: dict[int, tuple[keras.Variable, list[tuple[VariableSlice | None, np.ndarray]]]] = {}
    for shard, state in zip(shards, states):
        layout = split_state(model_optimizer, shard, averages_only=averages_only)
        values = split_bytes(state, layout)
        for key, (variable, piece) in _entries_of_model(plain, shard, averages_only).items():
            if (piece is None and shard is not shards[0]) or variable is learning_rate_of(plain):
                continue
            value = values[key]
            if key == _ITERATIONS:
                # Servers don't count steps whose gradients have not been sent yet.
                steps = _accumulated_steps(plain)
                value = value * steps + int(_value(variable)) % steps
            parts.setdefault(id(variable), (variable, []))[1].append((piece, value))
    # Copy one variable at a time, because the state may be several times as large as the model.
    for variable, pieces in parts.values():
        whole = _value(variable)
        for piece, value in pieces:
            _part(whole, piece, variables)[...] = value
        variable.assign(whole)


def _entries_of_model(plain: Any, shard: Shard, averages_only: bool) -> _Entries:
    numbers = [piece.variable for piece in shard.pieces]
    return _entries(plain, shard, numbers, averages_only=averages_only)


def _entries(
    optimizer: Any, shard: Shard, numbers: Sequence[int], *, averages_only: bool = False
) -> _Entries:
    """Return the variables of an optimizer that belong to a shard, in the same order on all ranks.

    The key of a scalar is the name of its attribute without leading underscores, such as
    ``iterations``. Other variables contain a value for each element of a variable of the model.
    Their keys also contain the index of this variable and the start of the shard's piece, as in
    ``momentums/0003/0``. ``numbers`` contains, for each piece, the index of its variable in the
    optimizer.
    """
    count = len(own_trainable_variables(optimizer))
    all_ids = {id(variable) for variable in optimizer.variables}
    known = {id(v) for v in accumulated_gradients(optimizer)}
    entries: _Entries = {}
    for attribute, value in vars(optimizer).items():
        name = attribute.lstrip("_")
        if attribute in NOT_STATE:
            continue
        if isinstance(value, keras.Variable) and id(value) in all_ids and not tuple(value.shape):
            entries[name] = value, None
            known.add(id(value))
        elif isinstance(value, (list, tuple)) and len(value) == count:
            ids = {id(entry) for entry in value if entry is not None}
            if ids and ids <= all_ids:
                known |= ids
                for number, piece in zip(numbers, shard.pieces):
                    if value[number] is not None:
                        entries[f"{name}/{piece.variable:04d}/{piece.start}"] = value[number], piece
    unknown = [v.path for v in optimizer.variables if id(v) not in known]
    if unknown:
        raise ModelError(
            f"{type(optimizer).__name__} has variables {', '.join(unknown)} that parameter servers "
            "can't assign to variables of the model. State must be in attributes that are scalars, "
            "or lists with an entry for each variable. Use one of Keras' optimizers, or train "
            "without parameter servers."
        )
    averages = {id(v) for v in moving_averages(optimizer)} if averages_only else all_ids
    return {key: entry for key, entry in sorted(entries.items()) if id(entry[0]) in averages}


def _built(optimizer: Any) -> tuple[Any, Sequence[Any]]:
    """Return the optimizer without loss scaling, and the optimizer's trainable variables."""
    plain = plain_optimizer(optimizer)
    if not plain.built:
        raise ModelError(
            f"The model's {type(plain).__name__} is not built; call "
            "optimizer.build(model.trainable_variables) first."
        )
    return plain, own_trainable_variables(plain)


def _part(whole: np.ndarray, piece: VariableSlice | None, variables: Sequence[Any]) -> np.ndarray:
    """Return a view of the part of a variable's state that belongs to ``piece``."""
    if piece is None or piece.stop - piece.start == math.prod(variables[piece.variable].shape):
        return whole  # its shape may differ from that of the variable
    return whole.reshape(-1)[piece.start : piece.stop].reshape(piece.shape)


def _value(variable: Any) -> np.ndarray:
    return np.array(variable.value.numpy())  # a copy that may be written to


def _scalar(variable: Any) -> np.ndarray:
    """Return a copy of a scalar as int64 or float64, so that all shards use the same dtype."""
    value = _value(variable)
    return value.astype(np.int64 if value.dtype.kind in "iu" else np.float64)
