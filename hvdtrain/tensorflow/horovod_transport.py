"""A real Horovod as the transport: for jobs in which only Horovod can communicate.

Its operations can't be given up, and under Gloo it does not notice ranks that don't come. So a rank
that has waited too long ends its process, and horovodrun the others.
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
# Types that it does not reduce, as one in which the result is the same but for its upper bits.
_SENT_AS = {"bool": "uint8", "int16": "int32", "uint16": "int32", "uint32": "int64"}
_TOP_BIT = np.uint64(1 << 63)


def _load_horovod() -> ModuleType:
    """Import ``horovod.tensorflow``.

    Raises:
        LaunchError: It can't be imported.
    """
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:
        # Built for another TensorFlow it raises whatever the loader of libraries does.
        raise LaunchError(
            f"Horovod is to do the reductions and can't be imported ({type(error).__name__}: "
            f"{error}). Install Horovod 0.28 for this TensorFlow, or start with horovodrun --mpi, "
            "mpirun or hvdtrain run."
        ) from error


class HorovodTransport(Transport):
    """Moves bytes through ``horovod.tensorflow``.

    Args:
        timeout_s: How long to wait for other ranks.

    Raises:
        LaunchError: There is no Horovod.
    """

    kind = "horovod"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._hvd = _load_horovod()
        self._hvd.init()
        self._patient = False

    def open(self, ranks: RankState) -> Transport:
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
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def close(self) -> None:
        self._watchdog.close()

    def messages(self) -> PointToPoint:
        raise _needs_mpi("Parameter servers")

    def subset(self, ranks: Sequence[int]) -> Transport | None:
        raise _needs_mpi("Process sets")

    def agree(self, call: Call) -> bool:
        mine = tf.convert_to_tensor(np.array([call.digest]))
        return bool((np.array(self._do(lambda: self._hvd.allgather(mine))) == call.digest).all())

    def allreduce(self, reduction: Reduction) -> bool:
        if not self.agree(reduction.call):
            return False
        op = getattr(self._hvd, _OPS[reduction.op])
        filled = [place for place, array in enumerate(reduction.inputs) if array.size]
        sent = [_packed(reduction.inputs[place], reduction.op) for place in filled]
        if not sent:
            return True
        results = self._do(lambda: self._hvd.grouped_allreduce(sent, op=op))
        for place, result in zip(filled, results):
            out = reduction.outputs[place]
            values = _unpacked(result, out.dtype, reduction.op)
            finish_average(values, reduction.op, self.ranks.size)
            if reduction.finite is not None:
                reduction.finite.check(values)
            np.copyto(out, values, casting="unsafe")
        return True

    def gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        if out.size:
            np.copyto(out, self._do(lambda: self._hvd.allgather(tf.convert_to_tensor(data))))

    def broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        if buffer.size:
            given = tf.convert_to_tensor(buffer)
            np.copyto(buffer, self._do(lambda: self._hvd.broadcast(given, root)))

    def alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        given = tf.convert_to_tensor(data)
        splits = tf.convert_to_tensor(list(send_counts), tf.int32)
        came, _ = self._do(lambda: self._hvd.alltoall(given, splits=splits))
        np.copyto(out, came)

    def _do(self, operation: Callable[[], Any]) -> Any:
        """Carry out an operation of Horovod's on this thread, eagerly and on the host."""
        try:
            with tf.init_scope(), tf.device("/CPU:0"):
                return operation()
        except tf.errors.OpError as error:
            what = self.ranks.waiting_in or "an operation"
            raise CollectiveError(
                f"Horovod could not finish {what}: {error.message}. "
                "Another rank failed or did not come; its own message tells why."
            ) from error


def _needs_mpi(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} need MPI, and here a real Horovod is the engine. Start with horovodrun --mpi, "
        "mpirun, srun or hvdtrain run, without --backend horovod."
    )


def _packed(array: np.ndarray, op: ReduceOp) -> tf.Tensor:
    """Return an array in a type that Horovod reduces; half types in float32, as by all engines."""
    values = widen(array)
    if values.dtype == np.uint64:
        # In the order of signed numbers where that matters; sums and products wrap alike.
        values = (values ^ _TOP_BIT if op in ("min", "max") else values).view(np.int64)
    return tf.convert_to_tensor(values.astype(_SENT_AS.get(values.dtype.name, values.dtype)))


def _unpacked(result: tf.Tensor, dtype: np.dtype, op: ReduceOp) -> np.ndarray:
    """Undo ``_packed`` on the result for an array of ``dtype``; half types stay in float32."""
    values = np.array(result)
    if dtype == np.uint64:
        values = values.view(np.uint64)
        return values ^ _TOP_BIT if op in ("min", "max") else values
    return values if dtype.name not in _SENT_AS else values.astype(dtype)
