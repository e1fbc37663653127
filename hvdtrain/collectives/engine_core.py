"""The internals of an engine: it runs operations, compares calls, and exchanges data."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np

from hvdtrain.collectives.calls import (
    JOIN,
    RAISED,
    Call,
    RanksRaised,
    SomeJoined,
    as_bytes,
    make_call,
    row_bytes,
)
from hvdtrain.collectives.fusion import empty_outputs, plan_fusion, split_evenly
from hvdtrain.collectives.kernels import FiniteCheck, ReduceOp, accumulator_dtype, reduce_flat
from hvdtrain.collectives.transport import RankState, Reduction, Transport
from hvdtrain.collectives.wire_format import wire_format
from hvdtrain.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationError,
    HvdtrainError,
    MismatchError,
    PeerFailedError,
    RanksLostError,
)

__all__ = ["EngineCore", "FinishedOperation"]

Result = TypeVar("Result")

# Operations to which a joined rank need not contribute.
_JOINABLE = ("allreduce", "allgather_object")
# Prefix of the error of a rank that left a section. No call's text starts with it.
_REASON = "\0"


class FinishedOperation(NamedTuple):
    """A completed or failed operation, which is passed to observers."""

    title: str  # operation and name
    # Operation, name and all other values that the ranks compared. Long text is shortened.
    call: str
    start_s: float  # start time on the monotonic clock
    stop_s: float  # end time on the monotonic clock
    waited_s: float  # seconds spent waiting for other ranks, not counting short waits
    error: str  # error type and message, or "" if the operation succeeded


class EngineCore(RankState):
    """Runs operations one at a time, checks that ranks make the same calls, and records errors."""

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self.observers: list[Callable[[FinishedOperation], None]] = []
        self.before_operation: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._joined: frozenset[int] = frozenset()  # the same on all ranks
        self._section = ""  # the outermost section
        # The error of another rank that ended the section.
        self._section_error: PeerFailedError | None = None
        # After this error, all further operations raise it.
        self.broken: HvdtrainError | None = None
        self.last_error: HvdtrainError | None = None
        self.closed = False
        self.transport = transport.open(self)

    @property
    def waited_s(self) -> float:
        """Total seconds spent waiting for other ranks, not counting short waits."""
        return self.transport.waited_s

    def _operate(self, call: Call, attempt: Callable[[], Result], source: int = -1) -> Result:
        """Run an operation.

        If an earlier error has left the ranks out of step, that error is raised instead.
        ``attempt`` is a function that runs the operation once with the current ranks. If the
        operation can't be repeated without a certain rank, such as the root of a broadcast,
        ``source`` is the initial rank of that rank. Otherwise ``source`` is -1.
        """
        start_s = self._enter(call)
        waited_s, error_text = self.transport.waited_s, ""
        try:
            try:
                if self.transport.recovery is None:
                    return attempt()
                return self.transport.recovery.run(self.operation, call, attempt, source)
            except SomeJoined as some:
                return self._operate_with_joined(call, attempt, some)
        except BaseException as raised:
            error = raised
            if isinstance(raised, RanksRaised):
                error = self._section_error = PeerFailedError(
                    f"{raised.text}. Rank {self.number} was waiting for it in {call.short_text} "
                    "and stops too."
                )
            error_text = f"{type(error).__name__}: {error}"
            self._remember(error)
            if error is raised:
                raise
            raise error from None
        finally:
            if self.observers:
                waited_s = self.transport.waited_s - waited_s
                self._notify_observers(call, start_s, waited_s, error_text)
            self.inside = None
            self._lock.release()

    def _enter(self, call: Call) -> float:
        """Take the lock and start an operation; return its start time."""
        self.before_operation()
        if not self._lock.acquire(timeout=self.transport.timeout_s):
            raise CollectiveTimeoutError(
                f"Another thread of rank {self.number} has been inside a collective "
                f"for {self.transport.timeout_s:g} s."
            )
        error = self.broken or (self._section_error if self._section else None)
        if self.closed:
            error = HvdtrainError(
                "Collectives were used after hvdtrain.shutdown(); call hvdtrain.init() first."
            )
        if error is not None:
            self._lock.release()
            raise error
        self.operation += 1
        start_s = time.monotonic()
        self.inside = start_s, call.short_text
        return start_s

    def _notify_observers(self, call: Call, start_s: float, waited_s: float, error: str) -> None:
        operation = FinishedOperation(
            call.title, call.short_text, start_s, time.monotonic(), waited_s, error
        )
        for observer in self.observers:
            observer(operation)

    def _operate_with_joined(
        self, call: Call, attempt: Callable[[], Result], some: SomeJoined
    ) -> Result:
        """Repeat an operation without contributions from the joined ranks."""
        self._joined = some.ranks
        try:
            others = self._call_of_others(call, sorted(some.ranks))
        except MismatchError:
            self._joined = frozenset()
            raise
        if self.rank not in some.ranks:
            return attempt()
        self._add_neutral(others)
        raise some

    def _remember(self, error: BaseException) -> None:
        if self.closed:
            return
        if isinstance(error, HvdtrainError):
            self.last_error = error
        # All ranks raise these errors in the same operation, so they remain in step.
        if error is self._section_error or isinstance(
            error, (ConfigurationError, MismatchError, RanksLostError, SomeJoined)
        ):
            return
        if isinstance(error, HvdtrainError):
            self.broken = error
        else:
            self._break(error, "an operation")

    def _break(self, error: BaseException, what: str) -> None:
        """Reject further operations, because this rank is not in step with the other ranks."""
        if self.size > 1 and self.broken is None:
            self.broken = CollectiveError(
                f"Rank {self.number} left {what} early ({type(error).__name__}: {error}) and is no "
                "longer in step with the other ranks. End the program."
            )
            # MPI may still write to buffers, and the frames of the error keep them alive.
            self.broken.__cause__ = error

    # All ranks must call the methods below, inside an operation.

    def _agree(self, call: Call) -> None:
        """Wait until every rank has made the same call.

        Raises:
            MismatchError: On every rank, if the calls differ.
            SomeJoined: On every rank, if some ranks have joined, and the calls of the remaining
                ranks are equal.
            RanksRaised: On every rank, if some ranks left a section with an error.
        """
        if not self.transport.agree(call):
            self._raise_mismatch(call)

    def _counts(self, call: Call, counts: Sequence[int]) -> np.ndarray:
        """Check that all ranks made the same call, then exchange ``counts`` between all ranks."""
        self._agree(call)
        return self._gather_counts(counts)

    def _exchange_parts(self, call: Call, data: np.ndarray) -> list[np.ndarray]:
        """Check that all ranks made the same call, then return the bytes that each rank passed."""
        self._agree(call)
        return self._gather_parts(data)

    def _reduce_arrays(
        self,
        call: Call,
        arrays: Sequence[np.ndarray],
        op: ReduceOp,
        require_finite: bool,
        wire: str = "none",
    ) -> tuple[Sequence[np.ndarray], FiniteCheck | None]:
        """Check that all ranks made the same call, then combine arrays of one dtype.

        Returns the results, and the ``FiniteCheck`` of the results, which is None if
        ``require_finite`` is false.
        """
        dtype, shapes = arrays[0].dtype, tuple(array.shape for array in arrays)
        transport = self.transport
        chunk_items = transport.chunk_bytes // accumulator_dtype(dtype).itemsize
        layout = plan_fusion(shapes, dtype.itemsize, chunk_items, transport.shares)
        outputs, flat = empty_outputs(transport.take_buffer(layout.output_bytes), layout, dtype)
        flat_inputs = [array.reshape(-1) for array in arrays]
        finite = FiniteCheck(dtype) if require_finite else None
        reduction = Reduction(call, layout, flat_inputs, flat, op, finite, wire_format(wire))
        if not transport.allreduce(reduction):
            self._raise_mismatch(call)
        return outputs, finite

    def _reduce_rows(self, call: Call, array: np.ndarray, op: ReduceOp) -> np.ndarray:
        """Check that all ranks made the same call, then reduce this rank's share of the rows."""
        self._agree(call)
        rows = split_evenly(array.shape[0], self.size)
        start, stop = rows[self.rank]
        share = array[start:stop]
        received = np.empty((self.size, share.size), array.dtype)
        if array.size:
            self.transport.alltoall_bytes(
                as_bytes(array),
                [(b - a) * row_bytes(array) for a, b in rows],
                as_bytes(received),
                [share.nbytes] * self.size,
            )
        total = reduce_flat(list(received), op, self.size)
        return total.astype(array.dtype, copy=False).reshape(share.shape)

    def _call_of_others(self, call: Call, joined: Sequence[int]) -> Call:
        """Return the call of the ranks that have not joined."""
        self.transport.start_over()
        # The joined ranks don't know the call.
        text = "" if self.rank in joined else json.dumps([call.kind, call.name, call.detail])
        data = np.frombuffer(text.encode(), np.uint8)
        parts = self._exchange_parts(make_call(JOIN, "call of others"), data)
        kind, name, detail = json.loads(next(part for part in parts if part.size).tobytes())
        others = make_call(kind, name, _tuples(detail))
        if others.kind not in _JOINABLE:
            raise MismatchError(
                f"Rank {', '.join(map(str, joined))} called join, and the others "
                f"called {others.short_text}. Until all ranks have joined, the others may only "
                "call allreduce, or nothing at all with --backend nccl. Make other calls before or "
                "after."
            )
        return others

    def _add_neutral(self, call: Call) -> None:
        """Take part in an operation of the other ranks without changing its result."""
        if call.kind != "allreduce":
            self._exchange_parts(call, np.empty(0, np.uint8))
            return
        op, name, shapes, *form = call.detail
        dtype = np.dtype(name)
        arrays = [np.full(shape, _neutral_value(op, dtype), dtype) for shape in shapes]
        # The check must run on this rank too, because its share of the result may be infinite.
        self._reduce_arrays(call, arrays, op, True, *form)

    def _gather_counts(self, counts: Sequence[int]) -> np.ndarray:
        own = np.array(counts, np.int64)
        everyone = np.empty((self.size, own.size), np.int64)
        self.transport.gather_bytes(as_bytes(own), as_bytes(everyone), [own.nbytes] * self.size)
        return everyone

    def _gather_parts(self, data: np.ndarray) -> list[np.ndarray]:
        counts = self._gather_counts([data.size])[:, 0].tolist()
        everything = np.empty(sum(counts), np.uint8)
        self.transport.gather_bytes(data, everything, counts)
        return np.split(everything, np.cumsum(counts)[:-1])

    def _raise_mismatch(self, call: Call) -> NoReturn:
        """Exchange the calls of all ranks and raise the same error on each."""
        own = _REASON + call.note if call.kind == RAISED else call.text
        parts = self._gather_parts(np.frombuffer(own.encode(), np.uint8))
        texts = [part.tobytes().decode() for part in parts]
        numbers = [self.numbers[member] for member in self.members]
        reasons = {
            number: text.removeprefix(_REASON)
            for number, text in zip(numbers, texts)
            if text.startswith(_REASON)
        }
        if reasons:
            self.transport.start_over()
            raise RanksRaised(reasons)
        joined = [rank for rank, text in enumerate(texts) if text == JOIN]
        if joined and len(set(texts)) == 2:
            raise SomeJoined(joined)
        self.transport.start_over()
        raise MismatchError(_mismatch_text(texts, numbers))


def _mismatch_text(texts: Sequence[str], numbers: Sequence[int]) -> str:
    """Return the error message that lists the different calls, each with its ranks."""
    ranks_by_text: dict[str, list[str]] = {}
    for number, text in zip(numbers, texts):
        ranks_by_text.setdefault(text, []).append(str(number))
    characters = enumerate(zip(*ranks_by_text))
    difference = next((place for place, column in characters if len(set(column)) > 1), 0)
    calls = "; ".join(
        f"rank {', '.join(ranks)}: {_shorten(text, difference)}"
        for text, ranks in ranks_by_text.items()
    )
    return (
        f"Ranks made different calls at the same point. {calls}. Every rank must make the same "
        "calls with the same names, shapes and types in the same order."
    )


def _shorten(text: str, difference: int, limit: int = 300) -> str:
    """Return the start of a long text, and the part around the first difference."""
    if len(text) <= limit:
        return text
    if difference < limit - 50:
        return f"{text[:limit]} …"
    return f"{text[:150]} … {text[difference - 50 : difference + 100]} …"


def _neutral_value(op: ReduceOp, dtype: np.dtype) -> object:
    """Return the value that does not change the result of a reduction, such as 0 for a sum.

    For an average, the value is 0. The sum is still divided by a number that counts this rank.
    """
    if op in ("sum", "average"):
        return 0
    if op == "product":
        return 1
    if dtype.kind == "b":
        return op == "min"
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op == "min" else limits.min
    return np.inf if op == "min" else -np.inf


def _tuples(value: object) -> tuple[object, ...]:
    """Convert nested lists from JSON back to tuples."""
    assert isinstance(value, list)
    return tuple(_tuples(entry) if isinstance(entry, list) else entry for entry in value)
