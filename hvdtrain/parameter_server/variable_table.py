"""The variables of one shard and the optimizer that updates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.fusion import ALIGNMENT_BYTES, BufferPool
from hvdtrain.errors import ModelError
from hvdtrain.parameter_server.gradients import ShardGradients
from hvdtrain.parameter_server.shard_optimizer import (
    assign_state,
    is_elementwise,
    optimizer_for_pieces,
    read_state,
)
from hvdtrain.parameter_server.sharding import Shard, VariableSlice
from hvdtrain.private_api.keras import assign_moving_averages, iterations_of, update_moving_averages

__all__ = ["VariableTable"]

# Copies to a GPU and back would cost more than the faster update saves.
_DEVICE = "/CPU:0"


class VariableTable:
    """The variables of one shard and their optimizer. Only one thread may use it at a time.

    Buffers are uint8 arrays of shape ``(shard.nbytes,)`` with the layout of ``shard``. ``apply``
    avoids a copy if its buffer is aligned to ``ALIGNMENT_BYTES``.

    Args:
        optimizer: The model's optimizer. The table uses a copy of it, which expects gradients that
            are already unscaled and accumulated.
        shard: The parts of the variables.
        variables: All trainable variables of the model. The table uses their names and constraints,
            and whether weight decay applies to them. It does not use their values, which ``load``
            sets.

    Raises:
        ModelError: If the optimizer can't be applied to parts of the model.
    """

    def __init__(self, optimizer: Any, shard: Shard, variables: Sequence[Any]) -> None:
        self.shard = shard
        wholes = [variables[piece.variable] for piece in shard.pieces]
        # the path of each piece's variable in the model
        self.paths = [whole.path for whole in wholes]
        with tf.device(_DEVICE):
            self._variables = [_piece_of(v, piece) for v, piece in zip(wholes, shard.pieces)]
            self._optimizer = optimizer_for_pieces(optimizer, self._variables, wholes)
        keeps = not is_elementwise(optimizer)
        self._copied = [keeps or variable.overwrite_with_gradient for variable in self._variables]
        read_state(self._optimizer, shard)  # fails now rather than at the first checkpoint
        self._flat = tf.TensorSpec([shard.nbytes], tf.uint8)
        self._assign = _trace(self._assign_all, [self._flat])
        self._read = _trace(self._read_all, [])
        self._steps: dict[tuple[frozenset[int], frozenset[int]], Callable[..., Any]] = {}
        self._bytes: Sequence[tf.Tensor] = ()  # the newest weights, in the variables' memory
        self._aligned: np.ndarray | None = None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update. Setting one with a schedule raises TypeError."""
        return float(keras.ops.convert_to_tensor(self._optimizer.learning_rate))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._optimizer.learning_rate = value

    def load(self, buffer: np.ndarray) -> None:
        """Set the weights from ``buffer``."""
        self._bytes = ()
        self._assign(self._tensor(buffer))

    def weights(self, buffer: np.ndarray) -> None:
        """Copy the weights to ``buffer``."""
        self._bytes = self._bytes or self._read()
        for piece, tensor in zip(self.shard.pieces, self._bytes):
            place = buffer[piece.offset : piece.offset + piece.nbytes]
            np.copyto(place, np.asarray(memoryview(tensor)))

    def apply(self, gradients: ShardGradients) -> None:
        """Update the weights once. Variables without a gradient don't change."""
        rows = gradients.rows
        key = frozenset(rows), frozenset(gradients.missing)
        if key not in self._steps:
            self._steps[key] = self._make_step(*key)
        with tf.device(_DEVICE):
            sparse = []
            for number in sorted(rows):
                indices, values = rows[number]
                sparse += [tf.constant(indices, tf.int64), tf.constant(values)]
            self._bytes = ()  # otherwise variables would get new memory
            self._bytes = self._steps[key](self._tensor(gradients.flat), *sparse)

    def state(self, *, averages_only: bool = False) -> dict[str, np.ndarray]:
        """Return copies of the optimizer's state, in the format of ``read_state``."""
        return read_state(self._optimizer, self.shard, averages_only=averages_only)

    def load_state(self, values: Mapping[str, np.ndarray]) -> None:
        """Set the optimizer's state from values in the format of ``read_state``."""
        assign_state(self._optimizer, self.shard, values)

    def _make_step(self, sparse: frozenset[int], missing: frozenset[int]) -> Callable[..., Any]:
        """Return a traced function that applies gradients of the given kinds.

        The function also returns the new weights. Reading the weights in a second call would cost
        as much as copying a megabyte.
        """
        signature = [self._flat]
        for number in sorted(sparse):
            piece = self.shard.pieces[number]
            signature.append(tf.TensorSpec([None], tf.int64))
            signature.append(tf.TensorSpec([None, *piece.shape[1:]], piece.dtype))

        def step(flat: tf.Tensor, *rows: tf.Tensor) -> list[tf.Tensor]:
            pairs = dict(zip(sorted(sparse), zip(rows[::2], rows[1::2])))
            present = [n for n in range(len(self._variables)) if n not in missing]
            with tf.device(_DEVICE):
                gradients = [
                    _slices(*pairs[n], self.shard.pieces[n].shape)
                    if n in pairs
                    else _value_in(flat, self.shard.pieces[n], copied=self._copied[n])
                    for n in present
                ]
                if present:
                    self._optimizer.apply(gradients, [self._variables[n] for n in present])
                else:
                    self._count_update()
            return self._read_all()

        return _trace(step, signature)

    def _count_update(self) -> None:
        """Do the other work that Keras does in an update in addition to applying gradients."""
        optimizer = self._optimizer
        update_moving_averages(optimizer, self._variables)
        iterations_of(optimizer).assign_add(1)
        if optimizer.use_ema and optimizer.ema_overwrite_frequency:
            tf.cond(
                optimizer.iterations % optimizer.ema_overwrite_frequency == 0,
                lambda: assign_moving_averages(optimizer, self._variables),
                lambda: None,
            )

    def _assign_all(self, flat: tf.Tensor) -> None:
        with tf.device(_DEVICE):
            for piece, variable in zip(self.shard.pieces, self._variables):
                variable.assign(_value_in(flat, piece))

    def _read_all(self) -> list[tf.Tensor]:
        # Return bytes, because Python's buffer protocol doesn't support all dtypes.
        with tf.device(_DEVICE):
            values = [tf.convert_to_tensor(variable.value) for variable in self._variables]
            return [tf.reshape(tf.bitcast(value, tf.uint8), [-1]) for value in values]

    def _tensor(self, buffer: np.ndarray) -> tf.Tensor:
        """Return a tensor that shares the memory of ``buffer``."""
        # TensorFlow aborts the process if memory isn't aligned.
        if buffer.ctypes.data % ALIGNMENT_BYTES or not buffer.flags.writeable:
            if self._aligned is None:
                self._aligned = BufferPool().take(self.shard.nbytes)
            np.copyto(self._aligned, buffer)
            buffer = self._aligned
        return tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())


def _trace(function: Callable[..., Any], signature: Sequence[tf.TensorSpec]) -> Any:
    # Calling the concrete function skips the check of the arguments.
    return tf.function(function, signature, autograph=False).get_concrete_function()


def _piece_of(whole: Any, piece: VariableSlice) -> keras.Variable:
    """Create a variable for a piece of the model's variable ``whole``. Both have the same path."""
    if whole.constraint is not None and tuple(whole.shape) != piece.shape:
        raise ModelError(
            f"{whole.path} has the constraint {type(whole.constraint).__name__}, which needs the "
            f"whole variable of shape {tuple(whole.shape)}, got a piece of shape {piece.shape}; "
            "use unsplittable_variables."
        )
    *scopes, name = whole.path.split("/")
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        variable = keras.Variable("zeros", piece.shape, piece.dtype, name=name)
    variable.constraint = whole.constraint
    variable.overwrite_with_gradient = getattr(whole, "overwrite_with_gradient", False)
    return variable


def _value_in(flat: tf.Tensor, piece: VariableSlice, copied: bool = True) -> tf.Tensor:
    """Return the value of ``piece`` in a flat buffer.

    If ``copied`` is true, the result is a copy. This is needed if a variable may keep a reference
    to the value, because the buffer is reused and its content changes.
    """
    part = tf.slice(flat, [piece.offset], [piece.nbytes])
    if copied:
        part = tf.raw_ops.DeepCopy(x=part)
    dtype = tf.as_dtype(piece.dtype)
    if dtype.size > 1:
        part = tf.reshape(part, [-1, dtype.size])
    return tf.reshape(tf.bitcast(part, dtype), piece.shape)


def _slices(indices: tf.Tensor, values: tf.Tensor, shape: Sequence[int]) -> tf.IndexedSlices:
    """Return a sparse gradient with unique rows, because Keras would square repeated ones."""
    unique, places = tf.unique(indices)
    sums = tf.math.unsorted_segment_sum(values, places, tf.size(unique))
    return tf.IndexedSlices(sums, unique, tf.constant(shape, tf.int64))
