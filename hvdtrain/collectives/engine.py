"""What all engines share: checking arguments, agreeing with the other ranks, locking.

An engine proper supplies the ``_…`` methods at the end, which move bytes and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from hvdtrain.collectives.calls import (
    Call,
    Calls,
    as_bytes,
    check_ranks,
    check_root,
    check_splits,
    plain,
    row_bytes,
    type_name,
    with_rows,
)
from hvdtrain.collectives.fusion import (
    ALIGNMENT_BYTES,
    BufferPool,
    FusionLayout,
    empty_outputs,
    plan_fusion,
    split_evenly,
)
from hvdtrain.collectives.interface import Codec, Done, ReduceOp
from hvdtrain.collectives.join import (
    JOIN,
    SomeJoined,
    check_can_join,
    neutral,
    read_call,
    write_call,
)
from hvdtrain.collectives.kernels import FiniteCheck, accumulator_dtype, check_reducible
from hvdtrain.collectives.mismatch import explain
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.serialization import decode, encode
from hvdtrain.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationError,
    HvdtrainError,
    MismatchError,
    NonFiniteError,
    RanksLostError,
    TooFewRanksError,
)

__all__ = ["Engine", "Reduction"]

# Ranks in step are through with most operations in less.
LONG_S = 0.01

Result = TypeVar("Result")


class Reduction(NamedTuple):
    """One allreduce as it was asked for; inputs and outputs are flat arrays of one type."""

    call: Call
    layout: FusionLayout
    inputs: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]
    op: ReduceOp
    finite: FiniteCheck | None


class _Handed(NamedTuple):
    """An operation that something else carries out."""

    call: Call
    since_s: float


class Engine:
    """Base of the engines; see ``hvdtrain.collectives.interface.Collectives`` for the contract."""

    kind = "engine"
    # Among how many ranks a chunk is divided for combining it.
    _shares = 1

    def __init__(self, rank: int, size: int, chunk_bytes: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.survives_losses = False
        self.generation = 0
        self.members = self.contributed = tuple(range(size))
        self.numbers = self.members
        self.too_few: TooFewRanksError | None = None
        self.timeout_s = timeout_s
        # Whole cache lines, and at least one item of every type.
        self._chunk_bytes = -(-chunk_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.observers: list[Callable[[Done], None]] = []
        self._pool = BufferPool()
        self._calls = Calls()
        self._lock = threading.Lock()
        self._operations = 0
        self._joined: frozenset[int] = frozenset()  # when some last were; the same on all ranks
        # Since when this rank is in which operation; another thread may ask.
        self._inside: tuple[float, str] | None = None
        self._handed: _Handed | None = None
        self.broken: HvdtrainError | None = None
        # By which this rank left an operation last; also one after which it may go on.
        self.last_error: HvdtrainError | None = None
        self.closed = False

    @property
    def member(self) -> int:
        return self.members[self.rank]

    @property
    def number(self) -> int:
        return self.numbers[self.member]

    @property
    def waiting_in(self) -> str:
        inside = self._inside
        return inside[1] if inside and time.monotonic() - inside[0] > LONG_S else ""

    # Public operations: contract in base.Collectives. What depends on who the ranks are stands in
    # the attempt, which is made again when some of them are lost.

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
        call = self._calls.get("allreduce", name, (op, type_name(dtype), shapes))
        check_reducible(dtype, op)
        outputs, finite = self._operate(
            call, lambda: self._reduce_all(call, arrays, op, require_finite)
        )
        if finite is not None and not finite.passed:
            raise NonFiniteError(f"The result of {call.text} holds NaN or infinity.")
        return list(outputs)

    def allgather(self, array: np.ndarray, *, name: str = "") -> np.ndarray:
        array = with_rows(array, "allgather")
        row = array.shape[1:]
        call = self._calls.get("allgather", name, (type_name(array.dtype), row))

        def attempt() -> np.ndarray:
            counts = self._exchange_counts(call, [array.shape[0]])[:, 0]
            result = np.empty((int(counts.sum()), *row), array.dtype)
            byte_counts = [int(count) * row_bytes(array) for count in counts]
            self._gather_bytes(as_bytes(array), as_bytes(result), byte_counts)
            return result

        return self._operate(call, attempt)

    def broadcast(
        self, array: np.ndarray, root: int = 0, *, name: str = "", replicated: bool = False
    ) -> np.ndarray:
        array = plain(np.asarray(array), "broadcast")
        detail = (type_name(array.dtype), array.shape)
        call, source = self._broadcast_call("broadcast", name, root, replicated, detail)

        def attempt() -> np.ndarray:
            root = self._place_of(source)
            self._agree(self._broadcast_call("broadcast", name, root, replicated, detail)[0])
            result = array.copy()
            self._broadcast_bytes(as_bytes(result), root)
            return result

        return self._operate(call, attempt, -1 if replicated else source)

    def reduce_scatter(
        self, array: np.ndarray, op: ReduceOp = "sum", *, name: str = ""
    ) -> np.ndarray:
        array = with_rows(array, "reduce_scatter")
        check_reducible(array.dtype, op)
        call = self._calls.get("reduce_scatter", name, (op, type_name(array.dtype), array.shape))

        def attempt() -> np.ndarray:
            self._agree(call)
            return self._reduce_scatter(array, split_evenly(array.shape[0], self.size), op)

        return self._operate(call, attempt)

    def alltoall(
        self, array: np.ndarray, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[np.ndarray, list[int]]:
        array = with_rows(array, "alltoall")
        members = self.members
        counts = check_splits(array.shape[0], splits, len(members))
        parts = dict(zip(members, np.split(array, np.cumsum(counts)[:-1])))
        call = self._calls.get("alltoall", name, (type_name(array.dtype), array.shape[1:]))

        def attempt() -> tuple[np.ndarray, list[int]]:
            kept = [parts[member] for member in self.members]
            data = array if self.members == members else np.concatenate(kept)
            counts = [part.shape[0] for part in kept]
            received = self._exchange_counts(call, counts)[:, self.rank]
            result = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
            self._alltoall_bytes(
                as_bytes(data),
                [count * row_bytes(array) for count in counts],
                as_bytes(result),
                [int(count) * row_bytes(array) for count in received],
            )
            return result, [int(count) for count in received]

        return self._operate(call, attempt)

    def barrier(self, *, name: str = "") -> None:
        call = self._calls.get("barrier", name, ())
        self._operate(call, lambda: self._agree(call))

    def broadcast_object(
        self,
        obj: Any,
        root: int = 0,
        *,
        name: str = "",
        codec: Codec = "json",
        replicated: bool = False,
    ) -> Any:
        kind = "broadcast_object"
        call, source = self._broadcast_call(kind, name, root, replicated, (codec,))
        data = encode(obj if replicated or self.rank == root else None, codec)

        def attempt() -> np.ndarray:
            root = self._place_of(source)
            call, _ = self._broadcast_call(kind, name, root, replicated, (codec,))
            counts = self._exchange_counts(call, [data.size])
            buffer = np.empty(int(counts[root, 0]), np.uint8)
            if self.rank == root:
                buffer[:] = data
            self._broadcast_bytes(buffer, root)
            return buffer

        return decode(self._operate(call, attempt, -1 if replicated else source), codec)

    def allgather_object(
        self, obj: Any, *, name: str = "", note: str = "", codec: Codec = "json"
    ) -> list[Any]:
        data = encode(obj, codec)
        call = self._calls.get("allgather_object", name, (codec,), note)
        parts = self._operate(call, lambda: self._gather_parts(call, data))
        # One that has joined has none.
        return [decode(part, codec) for part in parts if part.size]

    def join(self) -> int:
        if self.survives_losses:
            raise ConfigurationError(
                "Ranks of an elastic job can't join: it would not know who is left of them. Start "
                "the job with --no-elastic."
            )
        call = self._calls.get(JOIN, "", ())
        while True:
            try:
                self._operate(call, lambda: self._agree(call))
            except SomeJoined:
                continue
            last = max(set(range(self.size)) - self._joined)
            self._joined = frozenset()
            return last

    def messages(self) -> PointToPoint:
        raise NotImplementedError

    def share(self, nbytes: int) -> dict[int, np.ndarray]:
        """Nobody to share with unless an engine says otherwise."""
        return {}

    def subset(self, ranks: Sequence[int]) -> Engine | None:
        wanted = check_ranks(ranks, self.size)
        if self.survives_losses:
            raise ConfigurationError(
                "Ranks of an elastic job can't form a group of their own: it would not know which "
                "of them are left. Start the job with --no-elastic."
            )
        call = self._calls.get("subset", "", wanted)

        def attempt() -> Engine | None:
            self._agree(call)
            return self._subset(wanted)

        return self._operate(call, attempt)

    def hand_over(self, kind: str, name: str, detail: tuple[Any, ...]) -> None:
        call = self._calls.get(kind, name, detail)

        def attempt() -> None:
            if self._handed is not None:
                raise CollectiveError(
                    f"Rank {self.number} begins {call.place} before the end of "
                    f"{self._handed.call.place}, which an error has ended. End the program."
                )
            self._agree(call)
            self._handed = _Handed(call, time.monotonic())

        self._operate(call, attempt)

    def look_after(self) -> None:
        with self._lock:
            handed = self._handed
            if handed is None:
                return
            try:
                self._look_for_others(handed.call.place, time.monotonic() - handed.since_s)
            except HvdtrainError as error:
                self._remember(error)
                raise

    def take_back(self) -> None:
        with self._lock:
            handed, self._handed = self._handed, None
        if handed is not None:
            done = Done(
                handed.call.title, handed.call.place, handed.since_s, time.monotonic(), 0.0, ""
            )
            for observer in self.observers:
                observer(done)

    def fail(self, reason: str) -> None:
        """Nobody to tell unless an engine says otherwise."""

    def close(self) -> None:
        # Freeing communicators and windows is collective, and the process is about to end.
        self.closed = True

    # Bookkeeping.

    def _broadcast_call(
        self, kind: str, name: str, root: int, replicated: bool, detail: tuple[Any, ...]
    ) -> tuple[Call, int]:
        """The call of a broadcast, and the member that ``root`` is."""
        check_root(root, self.size)
        more = ("replicated",) if replicated else ()
        return self._calls.get(kind, name, (root, *detail, *more)), self.members[root]

    def _place_of(self, member: int) -> int:
        """The rank that a member has now; that of the chief where it is lost."""
        return self.members.index(member) if member in self.members else 0

    def _operate(self, call: Call, attempt: Callable[[], Result], source: int = -1) -> Result:
        """One operation at a time; none after an error that ranks may not all have had.

        Args:
            call: For errors, and for whoever asks what this rank waits in.
            attempt: Carries it out.
            source: The member without which it can't be done; -1 where any of them may be lost.
        """
        if not self._lock.acquire(timeout=self.timeout_s):
            raise CollectiveTimeoutError(
                f"Another thread of rank {self.number} has been inside a collective "
                f"for {self.timeout_s:g} s."
            )
        try:
            if self.closed:
                raise HvdtrainError(
                    "Collectives were used after hvdtrain.shutdown(); call hvdtrain.init() first."
                )
            if self.broken is not None:
                raise self.broken
            self._operations += 1
            self._inside = time.monotonic(), call.place
            return self._observe(call, lambda: self._carry_out_with_joined(call, attempt, source))
        except BaseException as error:
            self._remember(error)
            raise
        finally:
            self._inside = None
            self._lock.release()

    def _reduce_all(
        self, call: Call, arrays: Sequence[np.ndarray], op: ReduceOp, require_finite: bool
    ) -> tuple[Sequence[np.ndarray], FiniteCheck | None]:
        dtype, shapes = arrays[0].dtype, tuple(array.shape for array in arrays)
        chunk_items = self._chunk_bytes // accumulator_dtype(dtype).itemsize
        layout = plan_fusion(shapes, dtype.itemsize, chunk_items, self._shares)
        outputs, flat = empty_outputs(self._take_buffer(layout.output_bytes), layout, dtype)
        flat_inputs = [array.reshape(-1) for array in arrays]
        finite = FiniteCheck(dtype) if require_finite else None
        self._allreduce(Reduction(call, layout, flat_inputs, flat, op, finite))
        return outputs, finite

    def _take_buffer(self, nbytes: int) -> np.ndarray:
        """A flat uint8 array that nobody else holds, for results."""
        return self._pool.take(nbytes)

    def _gather_parts(self, call: Call, data: np.ndarray) -> list[np.ndarray]:
        counts = [int(c) for c in self._exchange_counts(call, [data.size])[:, 0]]
        everything = np.empty(sum(counts), np.uint8)
        self._gather_bytes(data, everything, counts)
        return np.split(everything, np.cumsum(counts)[:-1])

    def _carry_out_with_joined(
        self, call: Call, attempt: Callable[[], Result], source: int
    ) -> Result:
        """Carry an operation out, and where some ranks have joined, once more with them."""
        try:
            return self._carry_out(call, attempt, source)
        except SomeJoined as some:
            self._joined = some.ranks
            try:
                asked = self._learn_call(call)
                check_can_join(asked, sorted(some.ranks))
            except MismatchError:
                self._joined = frozenset()
                raise
            if self.rank not in some.ranks:
                return self._carry_out(call, attempt, source)
            self._stand_in(asked)
            raise

    def _learn_call(self, call: Call) -> Call:
        """What the ranks that have not joined call; collective."""
        self._start_over()
        mine = write_call(call) if self.rank not in self._joined else np.empty(0, np.uint8)
        parts = self._gather_parts(self._calls.get(JOIN, "call of others", ()), mine)
        return read_call(next(part for part in parts if part.size), self._calls)

    def _stand_in(self, call: Call) -> None:
        """Take part in an operation without anything to add."""
        if call.kind != "allreduce":
            self._gather_parts(call, np.empty(0, np.uint8))
            return
        op, name, shapes = call.detail
        # This rank may have the share of the result that is not finite.
        self._reduce_all(call, neutral(op, np.dtype(name), shapes), op, require_finite=True)

    def _exchange_counts(self, call: Call, counts: Sequence[int]) -> np.ndarray:
        """The counts of all ranks, int64 of shape (size, len(counts)); begins an operation."""
        self._agree(call)
        return self._gather_words(np.array(counts, np.int64))

    def _raise_mismatch(self, call: Call) -> NoReturn:
        """Say what each rank has called; all ranks raise the same, and may go on."""
        data = np.frombuffer(call.text.encode(), np.uint8)
        counts = self._gather_words(np.array([data.size], np.int64))[:, 0].tolist()
        everything = np.empty(sum(counts), np.uint8)
        self._gather_bytes(data, everything, counts)
        parts = np.split(everything, np.cumsum(counts)[:-1])
        texts = [part.tobytes().decode() for part in parts]
        joined = [rank for rank, text in enumerate(texts) if text == JOIN]
        if joined and len(set(texts)) == 2:
            raise SomeJoined(joined)
        self._start_over()
        raise MismatchError(explain(texts, [self.numbers[member] for member in self.members]))

    def _observe(self, call: Call, operation: Callable[[], Result]) -> Result:
        """Carry an operation out, and tell the observers of it."""
        if not self.observers:
            return operation()
        begun_s, waited_s, error = time.monotonic(), self._waited_s, ""
        try:
            return operation()
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            waited_s = self._waited_s - waited_s
            done = Done(call.title, call.place, begun_s, time.monotonic(), waited_s, error)
            for observer in self.observers:
                observer(done)

    def _remember(self, error: BaseException) -> None:
        if self.closed:
            return
        if isinstance(error, HvdtrainError):
            self.last_error = error
        # Ranks that are told that they differ, or what is lost, all leave the operation alike.
        if isinstance(error, (ConfigurationError, MismatchError, RanksLostError, SomeJoined)):
            return
        if isinstance(error, HvdtrainError):
            self.broken = error
        elif self.size > 1:
            self.broken = CollectiveError(
                f"Rank {self.number} left an operation before its end "
                f"({type(error).__name__}: {error}) and is no longer in step with the other ranks. "
                "End the program."
            )

    def _look_for_others(self, place: str, waited_s: float) -> None:
        """Raise if another rank has failed, or this one has waited too long."""
        if waited_s > self.timeout_s:
            raise CollectiveTimeoutError(
                f"rank {self.number} waited {self.timeout_s:g} s in {place}. If the work may take "
                "that long, raise HVDTRAIN_TIMEOUT_S."
            )

    @property
    def _waited_s(self) -> float:
        """How long this rank has waited for others in all; nobody to wait for."""
        return 0.0

    # What an engine supplies. ``_agree`` and ``_allreduce`` begin an operation: they wait until
    # every rank is there and see that all make the same call.

    def _carry_out(self, call: Call, attempt: Callable[[], Result], source: int) -> Result:
        """Make the attempt, where ranks may be lost until it has succeeded on all."""
        return attempt()

    def _start_over(self) -> None:
        """Forget an operation that was begun, on all ranks together."""

    def _agree(self, call: Call) -> None:
        """Return when every rank has made the same call; raise on every rank otherwise.

        ``SomeJoined`` where one part of them has joined and the other made the same call.
        """
        raise NotImplementedError

    def _allreduce(self, asked: Reduction) -> None:
        """Combine the inputs of all ranks into the outputs."""
        raise NotImplementedError

    def _gather_words(self, words: np.ndarray) -> np.ndarray:
        """The words of all ranks, int64 of shape (size, words.size)."""
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

    def _subset(self, ranks: Sequence[int]) -> Engine | None:
        """An engine of these ranks, which are in order; None on the others."""
        raise NotImplementedError
