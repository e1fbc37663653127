"""The transport that uses an installed Horovod, for jobs in which only Horovod can communicate.

Horovod's operations can't be aborted. With Gloo, Horovod also does not notice if a rank never calls
an operation. A rank that has waited too long therefore ends its process, and horovodrun then ends
the other ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.kernels import ReduceOp, finish_average, widen
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.transport import RankState, Reduction, Transport
from hvdtrain.collectives.waits import Watchdog
from hvdtrain.errors import CollectiveError, ConfigurationError, LaunchError

__all__ = ["HorovodTransport"]

_OPS = {"sum": "Sum", "average": "Sum", "min": "Min", "max": "Max", "product": "Product"}
# Types that Horovod does not reduce, and larger types that give the same result in the lower bits.
_SENT_AS = {"bool": "uint8", "int16": "int32", "uint16": "int32", "uint32": "int64"}
_TOP_BIT = np.uint64(1 << 63)


def _load_horovod() -> ModuleType:
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:
        # If Horovod was built for a different TensorFlow, the library loader may raise any error.
        raise LaunchError(
            f"This job communicates through Horovod, which can't be imported "
            f"({type(error).__name__}: {error}). Install Horovod 0.28 for this TensorFlow, or "
            "start with horovodrun --mpi, mpirun or hvdtrain run."
        ) from error


class HorovodTransport(Transport):
    """Sends and receives data with the operations of ``horovod.tensorflow``.

    Raises:
        LaunchError: If Horovod can't be imported.
    """

    kind = "horovod"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._hvd = _load_horovod()
        self._hvd.init()
        self._patient = False

    def open(self, ranks: RankState) -> Transport:
        """Start the thread that ends this process if it waits too long for other ranks."""
        super().open(ranks)
        ranks.set_ranks(self._hvd.rank(), self._hvd.size())
        self._watchdog = Watchdog(
            lambda: None if self._patient else ranks.inside,
            ranks.rank,
            ranks.size,
            self.timeout_s,
            library="Horovod",
        )
        self._watchdog.start()
        return self

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Wait for other ranks without a time-out within the ``with`` block."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def close(self) -> None:
        """Stop the thread that ``open`` started."""
        self._watchdog.close()

    def messages(self) -> PointToPoint:
        """Raise ``ConfigurationError``, because Horovod can't send messages between two ranks."""
        raise _needs_mpi("Parameter servers")

    def subset(self, ranks: Sequence[int]) -> Transport | None:
        """Raise ``ConfigurationError``. Process sets are only supported with MPI."""
        raise _needs_mpi("Process sets")

    def agree(self, call: Call) -> bool:
        """Return whether all ranks call the same collective with the same arguments."""
        digest = tf.convert_to_tensor(np.array([call.digest]))
        return bool((np.array(self._do(lambda: self._hvd.allgather(digest))) == call.digest).all())

    def allreduce(self, reduction: Reduction) -> bool:
        """Reduce arrays if all ranks call the same collective, and return whether they do."""
        if not self.agree(reduction.call):
            return False
        op = getattr(self._hvd, _OPS[reduction.op])
        pairs = [(a, out) for a, out in zip(reduction.inputs, reduction.outputs) if a.size]
        sent = [_packed(array, reduction.op) for array, _ in pairs]
        if not sent:
            return True
        results = self._do(lambda: self._hvd.grouped_allreduce(sent, op=op))
        for (_, out), result in zip(pairs, results):
            values = _unpacked(result, out.dtype, reduction.op)
            finish_average(values, reduction.op, self.ranks.size)
            if reduction.finite is not None:
                reduction.finite.check(values)
            np.copyto(out, values, casting="unsafe")
        return True

    def gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        """Return the bytes that each rank passed."""
        if out.size:
            np.copyto(out, self._do(lambda: self._hvd.allgather(tf.convert_to_tensor(data))))

    def broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        """Return the bytes that the rank ``root`` passed."""
        if buffer.size:
            tensor = tf.convert_to_tensor(buffer)
            np.copyto(buffer, self._do(lambda: self._hvd.broadcast(tensor, root)))

    def alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        """Send different bytes to each rank, and return the bytes from each rank."""
        tensor = tf.convert_to_tensor(data)
        splits = tf.convert_to_tensor(list(send_counts), tf.int32)
        rows, _ = self._do(lambda: self._hvd.alltoall(tensor, splits=splits))
        np.copyto(out, rows)

    def _do(self, operation: Callable[[], Any]) -> Any:
        """Run one of Horovod's operations eagerly on the host."""
        try:
            with tf.init_scope(), tf.device("/CPU:0"):
                return operation()
        except tf.errors.OpError as error:
            call = self.ranks.waiting_in or "an operation"
            raise CollectiveError(
                f"Horovod could not finish {call}: {error.message}. "
                "Another rank has failed or has not arrived; see that rank's message."
            ) from error


def _needs_mpi(feature: str) -> ConfigurationError:
    return ConfigurationError(
        f"{feature} need MPI, but this job communicates through Horovod. Start with horovodrun "
        "--mpi, mpirun, srun or hvdtrain run, without --backend horovod."
    )


def _packed(array: np.ndarray, op: ReduceOp) -> tf.Tensor:
    """Return an array in a dtype that Horovod reduces: float32 for 16-bit floats."""
    values = widen(array)
    if values.dtype == np.uint64:
        # Flipping the top bit keeps the order as a signed integer. Sums and products have the same
        # bits in both types.
        values = (values ^ _TOP_BIT if op in ("min", "max") else values).view(np.int64)
    return tf.convert_to_tensor(values.astype(_SENT_AS.get(values.dtype.name, values.dtype)))


def _unpacked(result: tf.Tensor, dtype: np.dtype, op: ReduceOp) -> np.ndarray:
    """Convert Horovod's result to ``dtype``, or to float32 for 16-bit floats."""
    values = np.array(result)
    if dtype == np.uint64:
        values = values.view(np.uint64)
        return values ^ _TOP_BIT if op in ("min", "max") else values
    return values if dtype.name not in _SENT_AS else values.astype(dtype)
