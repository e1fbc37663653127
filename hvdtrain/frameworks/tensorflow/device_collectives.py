"""Reductions on devices, with NCCL between GPUs or TensorFlow's ring between CPUs.

The reductions are operations of the graph (``CollectiveReduceV2``). Values are not copied to the
host. Tensors are divided into buckets. Each bucket is reduced as soon as its tensors are computed,
while other tensors are still being computed. The buckets are reduced one after another, because
NCCL needs the same order on all ranks.

When this rank arrives at the first bucket, the engine checks that all ranks make the same call.
During the reduction, a thread checks for failed ranks, and aborts the reduction if it finds one.
The time in which this rank computes the tensors of the next bucket does not count as waiting time.
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
from hvdtrain.collectives.fusion import fill_buckets
from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import CollectiveError, HvdtrainError
from hvdtrain.frameworks.tensorflow.tensors import Arrays, run_on_host
from hvdtrain.private_api import tensorflow as private_tensorflow

__all__ = ["GROUP_KEY", "DeviceCollectives"]

logger = logging.getLogger(__package__)

# The reduction of the last bucket overlaps with no computation, so it should be a small part of the
# whole. But each bucket has a fixed cost, and NCCL needs large messages for full bandwidth.
BUCKETS = 8
LEAST_BUCKET_BYTES = 2 << 20
MOST_BUCKET_BYTES = 32 << 20
CHECK_INTERVAL_S = 0.05
CAUSE_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 5.0

# TensorFlow's number of the group of all ranks.
GROUP_KEY = 1
_MERGE_OPS = {"sum": "Add", "average": "Add", "min": "Min", "max": "Max", "product": "Mul"}
# The types in which tensors are sent and reduced by default. Like all engines, this reduces float16
# and bfloat16 in float32.
_REDUCED_AS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.float32: tf.float32,
    tf.float64: tf.float64,
}

# Keys are never reused, because TensorFlow remembers the shape of each key until the process ends.
_instance_keys = itertools.count(1)

Before = Callable[[], object]
After = Callable[[bool, np.ndarray], None]


class DeviceCollectives:
    """Reductions over the devices of all ranks, one device per rank.

    Args:
        collectives: Engine that checks that all ranks start the same reduction.
        device: Name of this rank's device.
        hint: TensorFlow's implementation, ``"nccl"`` or ``"ring"``.
        bucket_bytes: Size of a bucket in bytes. 0 means a single bucket. With None, the size
            depends on the tensors.
    """

    def __init__(
        self, collectives: Engine, device: str, hint: str, bucket_bytes: int | None = None
    ) -> None:
        self._collectives = collectives
        self.device = device
        self.hint = hint
        self._bucket_bytes = bucket_bytes
        self._first_keys: dict[Any, int] = {}
        self._running = threading.Event()
        self._closed = False
        self._error: HvdtrainError | None = None
        threading.Thread(target=self._watch, name="hvdtrain devices", daemon=True).start()

    def close(self) -> None:
        """End the thread. Call this before the engine is closed."""
        self._closed = True
        self._running.set()

    def supports(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Return whether tensors can be reduced on devices.

        Tensors must have a floating dtype and a static shape. In sessions, no tensors are
        supported, because sessions don't know the devices of other ranks.
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
        sent_as: Any = None,
        before: Before | None = None,
        after: After | None = None,
    ) -> list[tf.Tensor]:
        """Reduce tensors of one type over all ranks, immediately or in the current graph.

        Args:
            tensors: Tensors that ``supports`` accepts, with the same shapes on all ranks.
            op: Reduction.
            name: Name for error messages, which must be the same on all ranks.
            sent_as: Type in which the tensors are sent and reduced, or its name. With None, float64
                tensors are sent as float64, and all others as float32. For averages in float16 and
                bfloat16, the tensors are divided by the number of ranks before they are summed, so
                that the sum does not overflow. NCCL sends bfloat16 as float32, because TensorFlow's
                NCCL operations don't support bfloat16.
            before: Function that is called on the host before the reduction.
            after: Function that is called on the host after the reduction, and may raise an error.
                Its first argument says whether all results are finite. If they are not, the second
                argument is a bool array of shape (2, tensors). The first row says which of this
                rank's tensors contain NaN, and the second row which of them contain infinity. Only
                tensors of buckets with non-finite results are marked.

        Raises:
            HvdtrainError: If ranks start different reductions, or if a rank has failed or does not
                start the reduction in time. In a graph, TensorFlow raises a different error.
                ``cause_of`` then returns the original error.
        """
        if not tensors:
            return []
        dtype = tensors[0].dtype
        wire = _wire_type(dtype, sent_as, self.hint)
        counts = [tensor.shape.num_elements() for tensor in tensors]
        shapes = tuple(tuple(tensor.shape.as_list()) for tensor in tensors)
        types = dtype.name if sent_as is None else f"{dtype.name} sent as {wire.name}"
        # Ranks make the same calls even if they have no elements to reduce.
        buckets = divide_into_buckets(counts, wire.size, self._bucket_bytes) or [[]]
        detail = op, types, shapes

        def begin() -> int:
            if before is not None:
                before()
            return self._begin(name, detail, len(buckets))

        def end(*flags: np.ndarray) -> None:
            self._running.clear()
            self._collectives.end_external(sum(counts) * dtype.size)
            if after is not None:
                after(*_join_flags(flags, buckets, len(tensors)))

        host = _HostFunctions(self._collectives, len(buckets), begin, end)
        results: list[Any] = list(tensors)
        try:
            for bucket in buckets:
                members = [tensors[n] for n in bucket]
                reduced = self._reduce_bucket(members, op, wire, host, after is not None)
                for n, result in zip(bucket, reduced):
                    results[n] = result
        except tf.errors.OpError as error:
            if isinstance(error, HvdtrainError):
                raise
            raise self.cause_of(error) or error from None
        # All results depend on the end of the reduction. So using any result waits for all of them,
        # and raises their error.
        with tf.control_dependencies(host.left), tf.device(self.device):
            return [tf.identity(result) for result in results]

    def cause_of(self, error: tf.errors.OpError) -> HvdtrainError | None:
        """Return the communication error that caused a TensorFlow error, or None.

        If a reduction was aborted, this method waits until it is known which rank has failed.
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
        self,
        tensors: Sequence[tf.Tensor],
        op: ReduceOp,
        wire: tf.DType,
        host: _HostFunctions,
        examine: bool,
    ) -> list[tf.Tensor]:
        if not tensors:
            host.arrive([])
            host.leave([])
            return []
        dtype, size = tensors[0].dtype, self._collectives.size
        divide_first = op == "average" and wire.size == 2
        with tf.device(self.device):
            flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
            if divide_first:
                flat = tf.cast(flat, _REDUCED_AS[dtype]) / size
            flat = tf.cast(flat, wire)
            arrived = [_first_value(flat)]
        key = host.arrive(arrived)
        with tf.device(self.device):
            total = tf.raw_ops.CollectiveReduceV2(
                input=flat,
                group_size=size,
                group_key=GROUP_KEY,
                instance_key=key,
                ordering_token=[],
                merge_op=_MERGE_OPS[op],
                final_op="Id",
                communication_hint=self.hint,
            )
            if op == "average" and not divide_first:
                total *= tf.constant(1.0 / size, wire)  # like all engines
            total = tf.cast(total, dtype)
            parts = tf.split(total, [tensor.shape.num_elements() for tensor in tensors])
            results = [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors)]
            signals = _not_finite(tensors, total) if examine else [_first_value(total)]
        host.leave(signals)
        return results

    def _begin(self, name: str, detail: Any, buckets: int) -> int:
        """Check that all ranks start the same reduction, and return the key of its first bucket.

        Keys are assigned when a reduction runs for the first time. All ranks run reductions in the
        same order, so they assign the same keys.
        """
        self._error = None
        try:
            self._collectives.begin_external("device_allreduce", name, detail)
        except HvdtrainError as error:
            self._error = error
            raise
        if (name, detail) not in self._first_keys:
            keys = [next(_instance_keys) for _ in range(buckets)]
            self._first_keys[name, detail] = keys[0]
        self._running.set()
        return self._first_keys[name, detail]

    def _watch(self) -> None:
        """Abort the reduction in progress if another rank has failed."""
        while True:
            self._running.wait()
            time.sleep(CHECK_INTERVAL_S)
            if self._closed:
                return
            try:
                self._collectives.check_external()
            except HvdtrainError as error:
                self._error = error
                _abort(error)
                return


def _abort(error: HvdtrainError) -> None:
    """Abort all reductions, or end this process if that fails, because NCCL may hang."""
    aborted = threading.Event()

    def abort() -> None:
        private_tensorflow.abort_collectives(str(error))
        aborted.set()

    threading.Thread(target=abort, name="hvdtrain abort", daemon=True).start()
    if not aborted.wait(ABORT_TIMEOUT_S):
        logger.error("a reduction can't be aborted, so this process ends")
        sys.excepthook(type(error), error, None)  # reports the error to the launcher
        os._exit(1)


class _HostFunctions:
    """Functions that run on the host before and after each bucket of a reduction.

    Args:
        collectives: The engine, which is notified when this rank waits and when it computes.
        buckets: Number of buckets.
        begin: Function that is called before the first bucket, and returns the key of this bucket.
        end: Function that is called after the last bucket. It gets the arguments of all calls of
            ``leave``.
    """

    def __init__(
        self,
        collectives: Engine,
        buckets: int,
        begin: Callable[[], int],
        end: Callable[..., None],
    ) -> None:
        self._collectives = collectives
        self._buckets = buckets
        self._begin = begin
        self._end = end
        self._bucket = 0
        self._first_key = 0
        self._signals: list[tf.Tensor] = []
        # result of the function that was added last, for use as a control dependency
        self.left: list[tf.Tensor] = []

    # An operation on a GPU ends before its results are computed. So the functions have values of
    # the bucket as inputs, because a control dependency would not wait for these values.

    def arrive(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Add the function that runs when this rank arrives at a bucket; return its key."""
        run = functools.partial(self._arrive, self._bucket)
        with tf.control_dependencies(self.left):
            return run_on_host(run, inputs, [[]], [tf.int32])[0]

    def leave(self, signals: Sequence[tf.Tensor]) -> None:
        """Add the function that runs after the reduction of a bucket."""
        self._signals += signals
        self._bucket += 1
        run = functools.partial(self._leave, self._bucket == self._buckets)
        inputs = self._signals if self._bucket == self._buckets else signals[:1]
        self.left = run_on_host(run, inputs, [[]], [tf.int32])

    def _arrive(self, bucket: int, *_: np.ndarray) -> Arrays:
        if bucket == 0:
            self._first_key = self._begin()
        else:
            self._collectives.resume_external()
        return [np.array(self._first_key + bucket, np.int32)]

    def _leave(self, is_last: bool, *signals: np.ndarray) -> Arrays:
        if is_last:
            self._end(*signals)
        else:
            self._collectives.pause_external()
        return [np.array(0, np.int32)]


def divide_into_buckets(
    counts: Sequence[int], item_bytes: int, bucket_bytes: int | None
) -> list[list[int]]:
    """Return the indices of the tensors in each bucket.

    Empty tensors are left out. The last tensors come first, because they are gradients that are
    computed first. A bucket is complete when it has at least ``bucket_bytes``. 0 means a single
    bucket. With None, the size of a bucket depends on the total size.
    """
    total_bytes = sum(counts) * item_bytes
    if bucket_bytes is None:
        even_bytes = -(-total_bytes // BUCKETS)
        bucket_bytes = min(max(even_bytes, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)
    indices = [n for n, count in enumerate(counts) if count]
    sizes = [count * item_bytes for count in counts]
    return fill_buckets(indices, sizes, bucket_bytes or total_bytes)


def _wire_type(dtype: tf.DType, sent_as: Any, hint: str) -> tf.DType:
    """Return the type in which tensors are sent and reduced."""
    if sent_as is None or (sent_as == tf.bfloat16 and hint == "nccl"):
        return _REDUCED_AS[dtype]
    return tf.as_dtype(sent_as)


def _first_value(flat: tf.Tensor) -> tf.Tensor:
    """Return a copy of the first value. A slice would share the tensor's memory."""
    return tf.gather(flat, [0])


def _not_finite(tensors: Sequence[tf.Tensor], total: tf.Tensor) -> list[tf.Tensor]:
    """Return whether the sum of a bucket is finite and, if not, which tensors are not."""
    finite = tf.reduce_all(tf.math.is_finite(total))

    def none() -> tf.Tensor:
        return tf.zeros([2, len(tensors)], tf.bool)

    def look() -> tf.Tensor:
        nan = [tf.reduce_any(tf.math.is_nan(tensor)) for tensor in tensors]
        infinite = [tf.reduce_any(tf.math.is_inf(tensor)) for tensor in tensors]
        return tf.stack([tf.stack(nan), tf.stack(infinite)])

    return [finite, tf.cond(finite, none, look)]


def _join_flags(
    flags: Sequence[np.ndarray], buckets: Sequence[Sequence[int]], tensors: int
) -> tuple[bool, np.ndarray]:
    """Combine the results of ``_not_finite`` from all buckets."""
    not_finite = np.zeros((2, tensors), bool)
    for bucket, which in zip(buckets, flags[1::2]):
        not_finite[:, bucket] = which
    return all(map(bool, flags[::2])), not_finite
