"""Steps that Python code makes, as Keras' loops on torch and JAX read them.

``HostBatches`` is for these backends what a ``tf.data.Dataset`` is for TensorFlow. On TensorFlow,
``tensorflow.datasets.to_dataset`` converts ``HostBatches`` to a ``tf.data.Dataset``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras

from hvdtrain.private_api.keras_data import DataAdapter

__all__ = ["JOINT_ROWS_UNKNOWN", "HostBatches", "Share"]

JOINT_ROWS_UNKNOWN = -1
"""The value of ``joint_rows`` if a rank can't determine it without communication."""


class Share(NamedTuple):
    """This rank's share of a step that all ranks take together.

    On TensorFlow, ``rows`` and ``joint_rows`` are int32 scalars. On torch and JAX they are ints.
    """

    batch: Any  # a batch as Keras passes it to a step in a single process
    # The number of rows of ``batch`` that count. It is either the number of all rows of ``batch``,
    # or 0. It is 0 if this rank's data has ended. ``batch`` then only provides the right structure.
    rows: Any
    joint_rows: Any  # The sum of ``rows`` over all ranks. -1 or None if the sum is unknown.


class HostBatches(DataAdapter):
    """This rank's share of each step, read by Keras' loops. It can be iterated several times.

    Iterating yields a ``Share`` for each step, whose batch consists of tensors of Keras' backend.
    Nothing is read before the first step is requested.

    Args:
        make: Start to read the data, and return an iterator. The batches of its elements consist of
            NumPy arrays or tensors.
        batch_spec: The structure of a batch, with a ``KerasTensor`` for each array.
        num_batches: The number of steps, or None if it is unknown or infinite.
        reads_ahead: Whether a thread makes the next step while Keras runs a step.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Share]],
        batch_spec: Any,
        *,
        num_batches: int | None,
        reads_ahead: bool,
    ) -> None:
        self.element_spec = Share(batch_spec, None, None)
        self.reads_ahead = reads_ahead
        self.make = make
        self._num_batches = num_batches
        self._stages: tuple[Callable[[Iterator[Share]], Iterator[Share]], ...] = ()

    def __iter__(self) -> Iterator[Share]:
        shares = _read_ahead(self.make()) if self.reads_ahead else self.make()
        for stage in self._stages:
            shares = stage(shares)
        # The thread that reads ahead must not convert, because it may use another GPU by default.
        return map(_converted, shares)

    def through(self, stage: Callable[[Iterator[Share]], Iterator[Share]]) -> HostBatches:
        """Return batches whose iterators are passed through ``stage``."""
        batches = copy.copy(self)
        batches._stages = (*self._stages, stage)
        return batches

    def map(self, function: Callable[[Share], Share]) -> HostBatches:
        """Return batches with ``function`` applied to each step."""
        return self.through(lambda shares: map(function, shares))

    def get_torch_dataloader(self) -> HostBatches:
        """Return what Keras iterates on torch."""
        return self

    def get_jax_iterator(self) -> HostBatches:
        """Return what Keras iterates on JAX."""
        return self

    @property
    def num_batches(self) -> int | None:
        """The number of steps, or None if it is unknown or infinite."""
        return self._num_batches


def _converted(share: Share) -> Share:
    batch = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), share.batch
    )
    return share._replace(batch=batch)


def _read_ahead(shares: Iterator[Share]) -> Iterator[Share]:
    """Yield the same steps, and let a thread make the next one meanwhile."""
    pool = ThreadPoolExecutor(1)
    try:
        share = next(shares, None)
        while share is not None:
            following = pool.submit(next, shares, None)
            yield share
            share = following.result()
    finally:
        # If the pass is abandoned, don't wait for a step in progress.
        pool.shutdown(wait=False, cancel_futures=True)
