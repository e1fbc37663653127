"""A stream of batches as joint steps of which a rank keeps its batch: ``tf.data`` operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.keras.data import batch_structure

__all__ = ["join_steps"]

_undecorated = tf.autograph.experimental.do_not_convert


def join_steps(
    dataset: tf.data.Dataset,
    *,
    rank: int,
    size: int,
    blanks: tuple[tf.Tensor, ...],
    ends: int,
    padded: bool,
) -> tf.data.Dataset:
    """Turn a stream of batches into joint steps, of which this rank keeps its batch.

    One element for each batch becomes one for each joint step: (tensors, rows, digest, True)
    becomes (True, tensors, rows, joint_rows, step, last, digest). A joint step is given out when
    the batch after it has come, or the end: so the last one knows that it is the last. Only one
    batch is held, whatever the number of ranks.

    Args:
        dataset: One element for each batch; the True tells it from an end.
        blanks: Tensors to compute with where this rank has no batch.
        ends: Marks to put at the end; each gives out a joint step, from the second on with
            rows = 0. Where there is no batch, they do so only if ``padded``.
        padded: Whether steps are given out where there is no batch at all.
    """
    no_print = tf.zeros([8], tf.uint8)
    zero = tf.constant(0, tf.int32)
    end = tf.data.Dataset.from_tensors((blanks, zero, no_print, False))
    dataset = dataset.concatenate(end.repeat(ends))
    # batches in the joint step, this rank's batch, its rows, joint rows, steps given, digest
    state = (zero, blanks, zero, zero, tf.constant(0, tf.int64), no_print)
    follow = _follow(rank, size, padded, dataset.element_spec)
    dataset = dataset.scan(state, _undecorated(lambda *both: follow(*both)))
    return dataset.filter(_undecorated(lambda ready, *_: ready))


@functools.lru_cache(maxsize=32)
def _follow(rank: int, size: int, padded: bool, element_spec: Any) -> Callable[..., Any]:
    """Make the function from the state and the next batch to the next state, as a graph.

    ``Dataset.scan`` traces it twice in each ``fit``, which takes a tenth of a second: it is kept.
    """
    counter, steps = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64)
    tensors, _, stream, _ = element_spec
    state = (counter, tensors, counter, counter, steps, stream)

    def follow(state: tuple[Any, ...], element: tuple[Any, ...]) -> tuple[Any, Any]:
        count, kept, rows, joint_rows, step, stream = state
        tensors, batch_rows, batch_print, is_batch = element
        whole = tf.equal(count, size)
        ready = tf.where(is_batch, whole, (count > 0) | (step > 0) | padded)
        given = (ready, kept, rows, joint_rows, step, ~is_batch, stream)
        position = tf.where(whole, 0, count)
        mine = is_batch & (position <= rank)
        kept = tf.cond(mine, lambda: tensors, lambda: kept)
        before = tf.where(tf.equal(position, 0), 0, rows)
        rows = tf.where(tf.equal(position, rank), batch_rows, before)
        joint_rows = tf.where(whole, 0, joint_rows) + batch_rows
        new_state = (
            tf.where(is_batch, position + 1, 0),
            kept,
            tf.where(is_batch, rows, 0),
            tf.where(is_batch, joint_rows, 0),
            step + tf.cast(ready, tf.int64),
            batch_structure.chain(stream, batch_print),  # of no more use after an end
        )
        return new_state, given

    return tf.function(follow, input_signature=(state, element_spec), autograph=False)
