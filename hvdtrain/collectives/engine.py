"""The operations between ranks: checks arguments, agrees with the other ranks, locks, observes.

What moves the bytes is a transport, of which each kind has a module of its own.
"""

from __future__ import annotations

import functools
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
    empty_outputs,
    plan_fusion,
    split_evenly,
)
from hvdtrain.collectives.interface import Codec, FinishedOperation, ReduceOp
from hvdtrain.collectives.join import (
    JOIN,
    SomeJoined,
    check_can_join,
    neutral,
    read_call,
    write_call,
)
from hvdtrain.collectives.kernels import (
    FiniteCheck,
    accumulator_dtype,
    check_reducible,
    combine,
    finish,
)
from hvdtrain.collectives.mismatch import explain
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.rank_state import RankState
from hvdtrain.collectives.serialization import decode, encode
from hvdtrain.collectives.shared_file import share_file
from hvdtrain.collectives.transport import Reduction, Transport
from hvdtrain.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationError,
    HvdtrainError,
    MismatchError,
    NonFiniteError,
    RanksLostError,
)

__all__ = ["Engine"]

Result = TypeVar("Result")


class _External(NamedTuple):
    """An operation that something else carries out."""

    call: Call
    since_s: float


class Engine(RankState):
    """Fulfils ``hvdtrain.collectives.interface.Collectives`` by what a transport moves.

    Args:
        transport: Carries the bytes; opened for this engine.
        parent: The engine of all ranks, where this is one of some of them.
    """

    def __init__(self, transport: Transport, parent: Engine | None = None) -> None:
        super().__init__()
        self.transport = transport
        self.kind = transport.kind
        self.observers: list[Callable[[FinishedOperation], None]] = []
        self._lock = threading.Lock()
        if parent is not None:
            # MPI may take calls of one thread at a time.
            self._lock, self.observers = parent._lock, parent.observers
        self._calls = Calls()
        self._joined: frozenset[int] = frozenset()  # when some last were; the same on all ranks
        self._external: _External | None = None
        self.broken: HvdtrainError | None = None
        # By which this rank left an operation last; also one after which it may go on.
        self.last_error: HvdtrainError | None = None
        self.closed = False
        transport.open(self)

    # Public operations: contract in interface.Collectives. What depends on who the ranks are stands
    # in the attempt, which is made again when some of them are lost.

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
        attempt = functools.partial(self._reduce_all, call, arrays, op, require_finite)
        outputs, finite = self._operate(call, attempt)
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
            self.transport.gather_bytes(as_bytes(array), as_bytes(result), byte_counts)
            return result

        return self._operate(call, attempt)

    def broadcast(
        self, array: np.ndarray, root: int = 0, *, name: str = "", replicated: bool = False
    ) -> np.ndarray:
        array = plain(np.asarray(array), "broadcast")
        detail = (type_name(array.dtype), array.shape)
        call, source = self._broadcast_call("broadcast", name, root, replicated, detail)

        def attempt() -> np.ndarray:
            root = self._rank_of(source)
            self._agree(self._broadcast_call("broadcast", name, root, replicated, detail)[0])
            result = array.copy()
            self.transport.broadcast_bytes(as_bytes(result), root)
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
            return self._reduce_rows(array, op)

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
            self.transport.alltoall_bytes(
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
            root = self._rank_of(source)
            call, _ = self._broadcast_call(kind, name, root, replicated, (codec,))
            counts = self._exchange_counts(call, [data.size])
            buffer = np.empty(int(counts[root, 0]), np.uint8)
            if self.rank == root:
                buffer[:] = data
            self.transport.broadcast_bytes(buffer, root)
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
        call = self._calls.get("messages", "", ())

        def attempt() -> PointToPoint:
            self._agree(call)
            return self.transport.messages()

        return self._operate(call, attempt)

    def share(self, nbytes: int) -> dict[int, np.ndarray]:
        host, name = self.transport.host, "shared memory"
        if host is None:
            return {}
        # Whole cache lines: ranks don't write to one another's.
        whole = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        asked = self.allgather_object([self.member, host, whole], name=name)
        sizes = {member: size for member, theirs, size in asked if theirs == host}

        def tell(path: str) -> str:
            paths = dict(self.allgather_object([self.member, path], name=name))
            return paths.get(min(sizes), "")

        def agree(mapped: bool) -> bool:
            everyone = self.allgather_object([self.member, mapped], name=name)
            return all(mapped for member, mapped in everyone if member in sizes)

        file = share_file(sum(sizes.values()), self.member == min(sizes), tell, agree)
        return {} if file is None else dict(zip(sizes, file.cut(list(sizes.values()))))

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
            transport = self.transport.subset(wanted)
            return None if transport is None else Engine(transport, self)

        return self._operate(call, attempt)

    def begin_external(self, kind: str, name: str, detail: tuple[Any, ...]) -> None:
        call = self._calls.get(kind, name, detail)

        def attempt() -> None:
            if self._external is not None:
                raise CollectiveError(
                    f"Rank {self.number} begins {call.short_text} before the end of "
                    f"{self._external.call.short_text}, which an error has ended. End the program."
                )
            self._agree(call)
            self._external = _External(call, time.monotonic())

        self._operate(call, attempt)

    def check_external(self) -> None:
        with self._lock:
            external = self._external
            if external is None:
                return
            try:
                self.transport.look_for_others(
                    external.call.short_text, time.monotonic() - external.since_s
                )
            except HvdtrainError as error:
                self._remember(error)
                raise

    def end_external(self) -> None:
        with self._lock:
            external, self._external = self._external, None
        if external is not None:
            self._tell_observers(external.call, external.since_s, 0.0, "")

    def fail(self, reason: str) -> None:
        self.transport.fail(reason)

    def close(self) -> None:
        # Freeing communicators and windows is collective, and the process is about to end.
        self.closed = True
        self.transport.close()

    # Bookkeeping.

    def _broadcast_call(
        self, kind: str, name: str, root: int, replicated: bool, detail: tuple[Any, ...]
    ) -> tuple[Call, int]:
        """The call of a broadcast, and the member that ``root`` is."""
        check_root(root, self.size)
        more = ("replicated",) if replicated else ()
        return self._calls.get(kind, name, (root, *detail, *more)), self.members[root]

    def _rank_of(self, member: int) -> int:
        """The rank that a member has now; that of the chief where it is lost."""
        return self.members.index(member) if member in self.members else 0

    def _operate(self, call: Call, attempt: Callable[[], Result], source: int = -1) -> Result:
        """One operation at a time; none after an error that ranks may not all have had.

        Args:
            call: For errors, and for whoever asks what this rank waits in.
            attempt: Carries it out.
            source: The member without which it can't be done; -1 where any of them may be lost.
        """
        begun_s = self._enter(call)
        waited_s, left_by = self.transport.waited_s, ""
        try:
            try:
                if self.transport.recovery is None:
                    return attempt()
                return self.transport.recovery.carry_out(self.operation, call, attempt, source)
            except SomeJoined as some:
                return self._carry_out_with_joined(call, attempt, some)
        except BaseException as error:
            left_by = f"{type(error).__name__}: {error}"
            self._remember(error)
            raise
        finally:
            if self.observers:
                waited_s = self.transport.waited_s - waited_s
                self._tell_observers(call, begun_s, waited_s, left_by)
            self.inside = None
            self._lock.release()

    def _enter(self, call: Call) -> float:
        """Begin an operation, which holds the lock; returns when that was."""
        if not self._lock.acquire(timeout=self.transport.timeout_s):
            raise CollectiveTimeoutError(
                f"Another thread of rank {self.number} has been inside a collective "
                f"for {self.transport.timeout_s:g} s."
            )
        refused = self.broken
        if self.closed:
            refused = HvdtrainError(
                "Collectives were used after hvdtrain.shutdown(); call hvdtrain.init() first."
            )
        if refused is not None:
            self._lock.release()
            raise refused
        self.operation += 1
        begun_s = time.monotonic()
        self.inside = begun_s, call.short_text
        return begun_s

    def _tell_observers(self, call: Call, begun_s: float, waited_s: float, error: str) -> None:
        done = FinishedOperation(
            call.title, call.short_text, begun_s, time.monotonic(), waited_s, error
        )
        for observer in self.observers:
            observer(done)

    def _carry_out_with_joined(
        self, call: Call, attempt: Callable[[], Result], some: SomeJoined
    ) -> Result:
        """Carry an operation out once more, in which those that have joined stand in."""
        self._joined = some.ranks
        try:
            asked = self._learn_call(call)
            check_can_join(asked, sorted(some.ranks))
        except MismatchError:
            self._joined = frozenset()
            raise
        if self.rank not in some.ranks:
            return attempt()
        self._stand_in(asked)
        raise some

    def _reduce_all(
        self, call: Call, arrays: Sequence[np.ndarray], op: ReduceOp, require_finite: bool
    ) -> tuple[Sequence[np.ndarray], FiniteCheck | None]:
        dtype, shapes = arrays[0].dtype, tuple(array.shape for array in arrays)
        chunk_items = self.transport.chunk_bytes // accumulator_dtype(dtype).itemsize
        layout = plan_fusion(shapes, dtype.itemsize, chunk_items, self.transport.shares)
        buffer = self.transport.take_buffer(layout.output_bytes)
        outputs, flat = empty_outputs(buffer, layout, dtype)
        flat_inputs = [array.reshape(-1) for array in arrays]
        finite = FiniteCheck(dtype) if require_finite else None
        if not self.transport.allreduce(Reduction(call, layout, flat_inputs, flat, op, finite)):
            self._raise_mismatch(call)
        return outputs, finite

    def _reduce_rows(self, array: np.ndarray, op: ReduceOp) -> np.ndarray:
        """This rank's share of the rows, combined from what all ranks have of them."""
        rows = split_evenly(array.shape[0], self.size)
        start, stop = rows[self.rank]
        mine = array[start:stop]
        received = np.empty((self.size, mine.size), array.dtype)
        if array.size:
            self.transport.alltoall_bytes(
                as_bytes(array),
                [(b - a) * row_bytes(array) for a, b in rows],
                as_bytes(received),
                [mine.nbytes] * self.size,
            )
        wide = accumulator_dtype(array.dtype)
        total = np.empty(mine.size, wide)
        combine(list(received), op, total, np.empty(mine.size, wide))
        finish(total, op, self.size)
        return total.astype(array.dtype, copy=False).reshape(mine.shape)

    def _gather_parts(self, call: Call, data: np.ndarray) -> list[np.ndarray]:
        self._agree(call)
        return self._gather_rows(data)

    def _gather_rows(self, data: np.ndarray) -> list[np.ndarray]:
        counts = self._gather_counts([data.size])[:, 0].tolist()
        everything = np.empty(sum(counts), np.uint8)
        self.transport.gather_bytes(data, everything, counts)
        return np.split(everything, np.cumsum(counts)[:-1])

    def _learn_call(self, call: Call) -> Call:
        """What the ranks that have not joined call; collective."""
        self.transport.start_over()
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

    def _agree(self, call: Call) -> None:
        """Return when every rank has made the same call; raise on every rank otherwise.

        ``SomeJoined`` where one part of them has joined and the other made the same call.
        """
        if not self.transport.agree(call):
            self._raise_mismatch(call)

    def _exchange_counts(self, call: Call, counts: Sequence[int]) -> np.ndarray:
        """The counts of all ranks, int64 of shape (size, len(counts)); begins an operation."""
        self._agree(call)
        return self._gather_counts(counts)

    def _gather_counts(self, counts: Sequence[int]) -> np.ndarray:
        mine = np.array(counts, np.int64)
        everyone = np.empty((self.size, mine.size), np.int64)
        each = [mine.nbytes] * self.size
        self.transport.gather_bytes(as_bytes(mine), as_bytes(everyone), each)
        return everyone

    def _raise_mismatch(self, call: Call) -> NoReturn:
        """Say what each rank has called; all ranks raise the same, and may go on."""
        parts = self._gather_rows(np.frombuffer(call.text.encode(), np.uint8))
        texts = [part.tobytes().decode() for part in parts]
        joined = [rank for rank, text in enumerate(texts) if text == JOIN]
        if joined and len(set(texts)) == 2:
            raise SomeJoined(joined)
        self.transport.start_over()
        raise MismatchError(explain(texts, [self.numbers[member] for member in self.members]))

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
