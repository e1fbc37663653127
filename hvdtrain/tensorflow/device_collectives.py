"""Reductions on devices, with NCCL between GPUs or TensorFlow's ring between CPUs.

They are operations of the graph (``CollectiveReduceV2``). Values are not copied to the host. Before
each reduction, the engine checks that all ranks make the same call. During the reduction, a thread
checks for failed ranks, and aborts the reduction if it finds one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import CollectiveError, HvdtrainError
from hvdtrain.private_api import tensorflow as private_tensorflow
from hvdtrain.tensorflow.numpy_op import Arrays, run_on_host

__all__ = ["GROUP_KEY", "DeviceCollectives"]

logger = logging.getLogger(__package__)

# Buckets are large enough for full bandwidth, and small enough to be sent while other gradients are
# computed.
BUCKET_BYTES = 32 << 20
CHECK_INTERVAL_S = 0.05
CAUSE_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 5.0

# TensorFlow's number of the group of all ranks.
GROUP_KEY = 1
_MERGE_OPS = {"sum": "Add", "average": "Add", "min": "Min", "max": "Max", "product": "Mul"}
# The types in which tensors are reduced. Like all engines, this reduces float16 and bfloat16 in
# float32.
_REDUCED_AS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.float32: tf.float32,
    tf.float64: tf.float64,
}

# Keys are never reused, because TensorFlow remembers the shape of each key until the process ends.
_instance_keys = itertools.count(1)


class DeviceCollectives:
    """Reductions over the devices of all ranks, one device per rank.

    Args:
        collectives: Engine that checks that all ranks start the same reduction.
        device: Name of this rank's device.
        hint: TensorFlow's implementation, ``"nccl"`` or ``"ring"``.
    """

    def __init__(self, collectives: Engine, device: str, hint: str) -> None:
        self._collectives = collectives
        self.device = device
        self.hint = hint
        self._first_keys: dict[Any, int] = {}
        self._running = threading.Event()
        self._error: HvdtrainError | None = None
        threading.Thread(target=self._watch, name="hvdtrain devices", daemon=True).start()

    def supports(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Return whether tensors can be reduced on devices.

        They must be floating and have static shapes. In sessions, no tensors are supported, because
        sessions don't know the devices of other ranks.
        """
        return tf.compat.v1.executing_eagerly_outside_functions() and all(
            tensor.dtype in _REDUCED_AS and tensor.shape.is_fully_defined() for tensor in tensors
        )

    def allreduce(
        self,
        tensors: Sequence[tf.Tensor],
        op: ReduceOp,
        *,
        name: str,
        before: Callable[[], object] | None = None,
        after: Callable[[bool, np.ndarray], None] | None = None,
    ) -> list[tf.Tensor]:
        """Reduce tensors of one type over all ranks, immediately or in the current graph.

        Args:
            tensors: Tensors that ``supports`` accepts, with the same shapes on all ranks.
            op: Reduction.
            name: Name for error messages, which must be the same on all ranks.
            before: Function that is called on the host before the reduction.
            after: Function that is called on the host after the reduction, and may raise an error.
                The first argument is whether all results are finite. If they are not, the second
                argument says which of this rank's tensors contain NaN (first row) and which contain
                infinity (second row), as bool of shape (2, tensors).

        Raises:
            HvdtrainError: If ranks start different reductions, or if a rank has failed or does not
                arrive in time. In a graph, TensorFlow raises a different error, for which
                ``cause_of`` returns this one.
        """
        if not tensors:
            return []
        dtype = tensors[0].dtype
        counts = [tensor.shape.num_elements() for tensor in tensors]
        shapes = tuple(tuple(tensor.shape.as_list()) for tensor in tensors)
        buckets = _divide_into_buckets(counts, dtype)

        def begin() -> Arrays:
            if before is not None:
                before()
            return [self._begin(name, (op, dtype.name, shapes), len(buckets))]

        (first_key,) = run_on_host(begin, [], [[]], [tf.int32])
        keys = [first_key + number for number in range(len(buckets))]
        results: list[Any] = list(tensors)
        try:
            with tf.device(self.device):
                for bucket, key in zip(buckets, keys):
                    reduced = self._reduce_bucket([tensors[n] for n in bucket], op, key)
                    for n, result in zip(bucket, reduced):
                        results[n] = result
                flags = _not_finite(tensors, results) if after is not None else []
        except tf.errors.OpError as error:
            raise self.cause_of(error) or error from None

        def end(*flags: np.ndarray) -> Arrays:
            self._running.clear()
            self._collectives.end_external(sum(counts) * dtype.size)
            if after is not None:
                finite, not_finite = flags
                after(bool(finite), not_finite)
            return [np.array(0, np.int32)]

        # All results depend on ``ended``. So using any result waits for all of them, and raises
        # their error.
        with tf.control_dependencies(results):
            ended = run_on_host(end, flags, [[]], [tf.int32])
        with tf.control_dependencies(ended), tf.device(self.device):
            return [tf.identity(result) for result in results]

    def cause_of(self, error: tf.errors.OpError) -> HvdtrainError | None:
        """Return the communication error that caused a TensorFlow error, or None.

        If a reduction was aborted, this waits for the news that another rank failed.
        """
        aborted = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while self._error is None and isinstance(error, aborted) and self._running.is_set():
            if time.monotonic() > deadline:
                return CollectiveError(
                    f"TensorFlow could not finish a reduction: {error.message}. Another rank or "
                    "the network failed; see that rank's message."
                )
            time.sleep(CHECK_INTERVAL_S)
        if self._error is None and "NCCL" in error.message:
            return CollectiveError(
                f"NCCL could not reduce: {error.message}. Set NCCL_DEBUG=INFO for details, or use "
                "--backend mpi."
            )
        return self._error

    def _reduce_bucket(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, key: tf.Tensor
    ) -> list[tf.Tensor]:
        dtype = tensors[0].dtype
        wide = _REDUCED_AS[dtype]
        flat = tf.concat([tf.cast(tf.reshape(tensor, [-1]), wide) for tensor in tensors], 0)
        total = tf.raw_ops.CollectiveReduceV2(
            input=flat,
            group_size=self._collectives.size,
            group_key=GROUP_KEY,
            instance_key=key,
            ordering_token=[],
            merge_op=_MERGE_OPS[op],
            final_op="Id",
            communication_hint=self.hint,
        )
        if op == "average":
            total *= tf.constant(1.0 / self._collectives.size, wide)  # like all engines
        counts = [tensor.shape.num_elements() for tensor in tensors]
        return [
            tf.reshape(tf.cast(part, dtype), tensor.shape)
            for part, tensor in zip(tf.split(total, counts), tensors)
        ]

    def _begin(self, name: str, detail: Any, buckets: int) -> np.ndarray:
        """Check that all ranks start the same reduction, and return the key of its first bucket.

        A reduction gets its keys the first time it is started, so all ranks assign keys in the same
        order.
        """
        self._error = None
        try:
            self._collectives.begin_external("device_allreduce", name, detail)
        except HvdtrainError as error:
            self._error = error
            raise
        if (name, detail) not in self._first_keys:
            keys = [next(_instance_keys) for _ in range(max(buckets, 1))]
            self._first_keys[name, detail] = keys[0]
        self._running.set()
        return np.array(self._first_keys[name, detail], np.int32)

    def _watch(self) -> None:
        """Abort the reduction in progress if another rank has failed."""
        while True:
            self._running.wait()
            time.sleep(CHECK_INTERVAL_S)
            try:
                self._collectives.check_external()
            except HvdtrainError as error:
                self._error = error
                _abort(error)
                return


def _abort(error: HvdtrainError) -> None:
    """Abort all reductions, and end this process if that is not possible.

    NCCL may hang. Then no exception would ever end the program.
    """
    abort = functools.partial(private_tensorflow.abort_collectives, str(error))
    thread = threading.Thread(target=abort, name="hvdtrain abort", daemon=True)
    thread.start()
    thread.join(ABORT_TIMEOUT_S)
    if thread.is_alive():
        logger.error("a reduction can't be aborted, so this process ends")
        sys.excepthook(type(error), error, None)  # reports the error to the launcher
        os._exit(1)


def _divide_into_buckets(counts: Sequence[int], dtype: tf.DType) -> list[list[int]]:
    """Return the indices of the tensors in each bucket.

    Empty tensors are left out. The last tensors come first, because their gradients are computed
    first.
    """
    capacity = BUCKET_BYTES // _REDUCED_AS[dtype].size
    buckets: list[list[int]] = []
    free = 0
    for n in reversed(range(len(counts))):
        if not counts[n]:
            continue
        if not buckets or counts[n] > free:
            buckets.append([])
            free = capacity
        buckets[-1].append(n)
        free -= counts[n]
    return buckets


def _not_finite(tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return whether all results are finite and, if not, which tensors have NaN or infinity."""
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(result)) for result in results])

    def none() -> tf.Tensor:
        return tf.zeros([2, len(tensors)], tf.bool)

    def look() -> tf.Tensor:
        nan = [tf.reduce_any(tf.math.is_nan(tensor)) for tensor in tensors]
        infinite = [tf.reduce_any(tf.math.is_inf(tensor)) for tensor in tensors]
        return tf.stack([tf.stack(nan), tf.stack(infinite)])

    return [finite, tf.cond(finite, none, look)]
