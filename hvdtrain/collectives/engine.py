"""What all engines share: checking arguments, agreeing with the other ranks, locking.

An engine proper supplies the ``_…`` methods at the end, which move bytes and nothing else.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.collectives.base import Codec, ReduceOp
from hvdtrain.collectives.kernels import FiniteCheck, accumulator_dtype, check_reducible
from hvdtrain.collectives.layout import (
    ALIGNMENT_BYTES,
    BufferPool,
    Layout,
    empty_outputs,
    plan_layout,
    split_evenly,
)
from hvdtrain.collectives.objects import decode, encode
from hvdtrain.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationError,
    HvdtrainError,
    NonFiniteError,
)

__all__ = ["Call", "Engine", "Reduction"]


class Call:
    """One operation as all ranks must agree on it, and as an error shows it.

    They need not agree on the note.
    """

    __slots__ = ("digest", "place", "text")

    def __init__(self, kind: str, name: str, detail: str, note: str = "") -> None:
        self.text = f"{kind}({name})" if name else kind
        if detail:
            self.text += f" of {detail}"
        word = hashlib.blake2b(self.text.encode(), digest_size=8).digest()
        self.digest = int.from_bytes(word, "little") >> 1  # fits a signed 64-bit word
        if note:
            self.text += f" ({note})"
        self.place = self.text if len(self.text) <= 200 else self.text[:200] + " …"


class Reduction(NamedTuple):
    """One allreduce as it was asked for; inputs and outputs are flat arrays of one type."""

    call: Call
    layout: Layout
    inputs: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]
    op: ReduceOp
    finite: FiniteCheck | None


class Engine:
    """Base of the engines; see ``hvdtrain.collectives.base.Collectives`` for the contract."""

    kind = "engine"
    # Among how many ranks a chunk is divided for combining it.
    _shares = 1

    def __init__(self, rank: int, size: int, chunk_bytes: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        # Whole cache lines, and at least one item of every type.
        self._chunk_bytes = -(-chunk_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._pool = BufferPool()
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._lock = threading.Lock()
        self._operations = 0
        self.broken: HvdtrainError | None = None
        self.closed = False

    # Public operations: contract in base.Collectives.

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum", *, name: str = "") -> np.ndarray:
        return self.grouped_allreduce([array], op, name=name)[0]

    def grouped_allreduce(
        self,
        arrays: Sequence[np.ndarray],
        op: ReduceOp = "sum",
        *,
        name: str = "",
        require_finite: bool = False,
    ) -> list[np.ndarray]:
        arrays = [np.asarray(array, order="C") for array in arrays]
        if not arrays:
            return []
        dtype = arrays[0].dtype
        if any(array.dtype != dtype for array in arrays):
            received = ", ".join(sorted({str(array.dtype) for array in arrays}))
            raise ConfigurationError(
                f"A grouped allreduce takes arrays of one type, received {received}; make one "
                "call for each type."
            )
        shapes = tuple(array.shape for array in arrays)
        call = self._call("allreduce", name, (op, _type_name(dtype), shapes))
        check_reducible(dtype, op)
        chunk_items = self._chunk_bytes // accumulator_dtype(dtype).itemsize
        layout = plan_layout(shapes, dtype.itemsize, chunk_items, self._shares)
        with self._operation():
            outputs, flat = empty_outputs(self._pool, layout, dtype)
            flat_inputs = [array.reshape(-1) for array in arrays]
            finite = FiniteCheck(dtype) if require_finite else None
            self._allreduce(Reduction(call, layout, flat_inputs, flat, op, finite))
        if finite is not None and not finite.passed:
            raise NonFiniteError(f"The result of {call.text} holds NaN or infinity.")
        return list(outputs)

    def allgather(self, array: np.ndarray, *, name: str = "") -> np.ndarray:
        array = _with_rows(array, "allgather")
        row = array.shape[1:]
        call = self._call("allgather", name, (_type_name(array.dtype), row))
        with self._operation():
            counts = self._exchange_counts(call, [array.shape[0]])[:, 0]
            result = np.empty((int(counts.sum()), *row), array.dtype)
            row_bytes = _row_bytes(array)
            byte_counts = [int(count) * row_bytes for count in counts]
            self._gather_bytes(_as_bytes(array), _as_bytes(result), byte_counts)
        return result

    def broadcast(self, array: np.ndarray, root: int = 0, *, name: str = "") -> np.ndarray:
        array = _plain(np.asarray(array), "broadcast")
        self._check_root(root)
        call = self._call("broadcast", name, (root, _type_name(array.dtype), array.shape))
        result = array.copy()
        with self._operation():
            self._agree(call)
            self._broadcast_bytes(_as_bytes(result), root)
        return result

    def reduce_scatter(
        self, array: np.ndarray, op: ReduceOp = "sum", *, name: str = ""
    ) -> np.ndarray:
        array = _with_rows(array, "reduce_scatter")
        check_reducible(array.dtype, op)
        call = self._call("reduce_scatter", name, (op, _type_name(array.dtype), array.shape))
        with self._operation():
            self._agree(call)
            return self._reduce_scatter(array, split_evenly(array.shape[0], self.size), op)

    def alltoall(
        self, array: np.ndarray, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[np.ndarray, list[int]]:
        array = _with_rows(array, "alltoall")
        splits = self._check_splits(array.shape[0], splits)
        call = self._call("alltoall", name, (_type_name(array.dtype), array.shape[1:]))
        with self._operation():
            received = self._exchange_counts(call, splits)[:, self.rank]
            result = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
            row_bytes = _row_bytes(array)
            self._alltoall_bytes(
                _as_bytes(array),
                [count * row_bytes for count in splits],
                _as_bytes(result),
                [int(count) * row_bytes for count in received],
            )
        return result, [int(count) for count in received]

    def barrier(self, *, name: str = "") -> None:
        call = self._call("barrier", name, ())
        with self._operation():
            self._agree(call)

    def broadcast_object(
        self, obj: Any, root: int = 0, *, name: str = "", codec: Codec = "json"
    ) -> Any:
        self._check_root(root)
        data = encode(obj if self.rank == root else None, codec)
        call = self._call("broadcast_object", name, (root, codec))
        with self._operation():
            counts = self._exchange_counts(call, [data.size])
            buffer = np.empty(int(counts[root, 0]), np.uint8)
            if self.rank == root:
                buffer[:] = data
            self._broadcast_bytes(buffer, root)
        return decode(buffer, codec)

    def allgather_object(
        self, obj: Any, *, name: str = "", note: str = "", codec: Codec = "json"
    ) -> list[Any]:
        data = encode(obj, codec)
        call = self._call("allgather_object", name, (codec,), note)
        with self._operation():
            counts = [int(c) for c in self._exchange_counts(call, [data.size])[:, 0]]
            joined = np.empty(sum(counts), np.uint8)
            self._gather_bytes(data, joined, counts)
        ends = np.cumsum(counts)
        return [decode(joined[end - count : end], codec) for end, count in zip(ends, counts)]

    def fail(self, reason: str) -> None:
        """Nobody to tell unless an engine says otherwise."""

    def close(self) -> None:
        # Freeing communicators and windows is collective, and the process is about to end.
        self.closed = True

    # Checks and bookkeeping.

    def _call(self, kind: str, name: str, detail: tuple[Any, ...], note: str = "") -> Call:
        key = (kind, name, detail, note)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) > 4096:
                self._calls.clear()
            text = ", ".join(str(part) for part in detail)
            call = self._calls[key] = Call(kind, name, text, note)
        return call

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """One operation at a time; after an error between ranks none can be trusted any more."""
        if not self._lock.acquire(timeout=self.timeout_s):
            raise CollectiveTimeoutError(
                f"Another thread of rank {self.rank} has been inside a collective for "
                f"{self.timeout_s:g} s."
            )
        try:
            if self.closed:
                raise HvdtrainError(
                    "Collectives were used after hvdtrain.shutdown(); call hvdtrain.init() first."
                )
            if self.broken is not None:
                raise self.broken
            self._operations += 1
            yield
        except BaseException as error:
            self._remember(error)
            raise
        finally:
            self._lock.release()

    def _remember(self, error: BaseException) -> None:
        if self.closed or isinstance(error, ConfigurationError):
            return
        if isinstance(error, HvdtrainError):
            self.broken = error
        elif self.size > 1:
            self.broken = CollectiveError(
                f"Rank {self.rank} left an operation before its end ({type(error).__name__}: "
                f"{error}) and is no longer in step with the other ranks. End the program."
            )

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ConfigurationError(f"root={root} is no rank; expected 0 to {self.size - 1}.")

    def _check_splits(self, rows: int, splits: Sequence[int] | None) -> list[int]:
        if splits is None:
            if rows % self.size:
                raise ConfigurationError(
                    f"alltoall without splits divides the rows evenly, and {rows} rows don't "
                    f"divide by {self.size} ranks; pass splits."
                )
            return [rows // self.size] * self.size
        counts = [int(count) for count in splits]
        if len(counts) != self.size or sum(counts) != rows or min(counts) < 0:
            raise ConfigurationError(
                f"splits={counts} don't fit: expected {self.size} numbers, none negative, that "
                f"add up to {rows} rows."
            )
        return counts

    # What an engine supplies. ``_agree``, ``_allreduce`` and ``_exchange_counts`` begin an
    # operation: they wait until every rank is there and see that all make the same call.

    def _agree(self, call: Call) -> None:
        """Return when every rank has made the same call; raise on every rank otherwise."""
        raise NotImplementedError

    def _allreduce(self, asked: Reduction) -> None:
        """Combine the inputs of all ranks into the outputs."""
        raise NotImplementedError

    def _exchange_counts(self, call: Call, counts: Sequence[int]) -> np.ndarray:
        """The counts of all ranks, int64 of shape (size, len(counts))."""
        raise NotImplementedError

    def _gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        raise NotImplementedError

    def _broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        raise NotImplementedError

    def _reduce_scatter(
        self, array: np.ndarray, rows: Sequence[tuple[int, int]], op: ReduceOp
    ) -> np.ndarray:
        raise NotImplementedError

    def _alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        raise NotImplementedError


def _with_rows(array: np.ndarray, operation: str) -> np.ndarray:
    if array.ndim == 0:
        raise ConfigurationError(
            f"{operation} works along the first axis and received a scalar; pass an array of "
            "one element."
        )
    return _plain(array, operation)


def _plain(array: np.ndarray, operation: str) -> np.ndarray:
    if array.dtype.hasobject:
        raise ConfigurationError(
            f"{operation}: an array of type {array.dtype} can't be sent, its bytes mean nothing to "
            "other ranks. Pass numbers, or use broadcast_object or allgather_object."
        )
    return np.asarray(array, order="C")


def _type_name(dtype: np.dtype) -> str:
    """Its name, or where the bytes lie in the other order than this machine's, how they lie."""
    return dtype.name if dtype.isnative else dtype.str


def _row_bytes(array: np.ndarray) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
