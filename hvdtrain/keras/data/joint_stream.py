"""A stream of batches as joint steps of which a rank keeps its batch: ``tf.data`` operations."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.keras.data import structures

__all__ = ["JointStream"]

_undecorated = tf.autograph.experimental.do_not_convert


class JointStream:
    """Turns a stream of batches into joint steps, of which this rank keeps its batch.

    A joint step is given out when the batch after it has come, or the end: so the last one knows
    that it is the last. Only one batch is held, whatever the number of ranks.
    """

    def __init__(
        self, *, rank: int, size: int, blanks: tuple[tf.Tensor, ...], padded: bool
    ) -> None:
        self._rank = rank
        self._size = size
        self._blanks = blanks
        self._padded = padded

    def apply(self, dataset: tf.data.Dataset, *, ends: int) -> tf.data.Dataset:
        """One element for each batch to one for each joint step.

        From (tensors, rows, digest, True) to (True, tensors, rows, joint_rows, step, last, digest).

        Args:
            dataset: One element for each batch; the True tells it from an end.
            ends: Marks to put at the end; each gives out a joint step, from the second on with
                rows = 0. Where there is no batch, they do so only if ``padded``.
        """
        no_print = tf.zeros([8], tf.uint8)
        zero = tf.constant(0, tf.int32)
        end = tf.data.Dataset.from_tensors((self._blanks, zero, no_print, False))
        dataset = dataset.concatenate(end.repeat(ends))
        # batches in the joint step, this rank's batch, its rows, joint rows, steps given, digest
        state = (zero, self._blanks, zero, zero, tf.constant(0, tf.int64), no_print)
        dataset = dataset.scan(state, _undecorated(self._next))
        return dataset.filter(_undecorated(lambda ready, *_: ready))

    def _next(self, state: tuple[Any, ...], element: tuple[Any, ...]) -> tuple[Any, Any]:
        count, kept, rows, joint_rows, step, stream = state
        tensors, batch_rows, batch_print, is_batch = element
        whole = tf.equal(count, self._size)
        ready = tf.where(is_batch, whole, (count > 0) | (step > 0) | self._padded)
        given = (ready, kept, rows, joint_rows, step, ~is_batch, stream)
        position = tf.where(whole, 0, count)
        mine = is_batch & (position <= self._rank)
        kept = tf.cond(mine, lambda: tensors, lambda: kept)
        before = tf.where(tf.equal(position, 0), 0, rows)
        rows = tf.where(tf.equal(position, self._rank), batch_rows, before)
        joint_rows = tf.where(whole, 0, joint_rows) + batch_rows
        new_state = (
            tf.where(is_batch, position + 1, 0),
            kept,
            tf.where(is_batch, rows, 0),
            tf.where(is_batch, joint_rows, 0),
            step + tf.cast(ready, tf.int64),
            structures.chain(stream, batch_print),  # of no more use after an end
        )
        return new_state, given
