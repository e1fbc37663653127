"""Collectives between the ranks of a job: NumPy arrays in, NumPy arrays out.

Every rank calls the same operations in the same order. The engine checks that they do: a difference
in operation, name, shape or dtype raises ``MismatchError`` on every rank. The results of
``allreduce`` are bitwise identical on all ranks. float16 and bfloat16 are summed in float32.

In an elastic job, the other ranks continue after a rank dies. The operation in which the loss is
detected succeeds, and ``rank``, ``size`` and ``members`` change. Either all remaining ranks get a
result that includes the contributions of the lost ranks, or the operation is repeated without them:

- ``allreduce`` combines the arrays of the remaining ranks; ``average`` divides by their number.
- ``allgather`` and ``allgather_object`` omit the lost ranks.
- ``broadcast`` and ``broadcast_object`` raise ``RanksLostError`` on every rank if the root was lost
  before all ranks had its value; the ranks may continue. With ``replicated=True`` they get the
  chief's value instead.
- ``reduce_scatter`` divides the result among the remaining ranks.
- ``alltoall`` drops the rows for lost ranks.

Rank arguments are current ranks. Code that keeps data by rank or by size must compare
``generation`` before it uses the data. After the same operation, ``generation`` may have grown on
one rank and not yet on another, which learns of the loss in its next operation. For a common
decision, reduce it with "max" first.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdtrain.collectives.calls import (
    Call,
    Codec,
    as_bytes,
    check_ranks,
    check_root,
    check_splits,
    decode,
    encode,
    plain,
    row_bytes,
    type_name,
    with_rows,
)
from hvdtrain.collectives.exchange import JOIN, Exchange, SomeJoined, check_can_join
from hvdtrain.collectives.fusion import aligned
from hvdtrain.collectives.kernels import ReduceOp, check_reducible
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.sections import RAISED, RanksRaised, reason_of, warn_if_late
from hvdtrain.collectives.shared_file import share_file
from hvdtrain.collectives.single import SingleTransport
from hvdtrain.collectives.transport import Transport
from hvdtrain.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationError,
    HvdtrainError,
    MismatchError,
    NonFiniteError,
    PeerFailedError,
    Preempted,
    RanksLostError,
)

__all__ = ["Engine", "FinishedOperation", "single_engine"]

Result = TypeVar("Result")


class FinishedOperation(NamedTuple):
    """A completed or failed operation, as observers receive it.

    Attributes:
        title: Operation and name.
        call: Everything that the ranks had to agree on, shortened if it is long.
        start_s: Start time on the monotonic clock.
        stop_s: End time on the monotonic clock.
        waited_s: Seconds spent waiting for other ranks, not counting short waits.
        error: Error type and message, or "" if the operation succeeded.
    """

    title: str
    call: str
    start_s: float
    stop_s: float
    waited_s: float
    error: str


def single_engine() -> Engine:
    """Return the engine of a process that trains alone."""
    return Engine(SingleTransport())


class Engine(Exchange):
    """Collectives between all ranks of the job, or some of them.

    ``name`` identifies an operation in errors; all ranks must pass the same name. Input arrays are
    never modified; result arrays belong to the caller.

    Args:
        transport: Moves the bytes. The engine opens it.
        parent: The engine of all ranks, if this engine connects a subset of them.

    Attributes:
        kind: Name of the transport.
        rank: This rank among the remaining ranks, from 0 for the chief.
        size: Number of remaining ranks.
        survives_losses: Whether the other ranks continue after a rank dies.
        generation: How many times ranks have been lost, from 0.
        members: The initial ranks of the remaining ranks, in order. A rank keeps its initial rank
            when others are lost; messages and the launcher use it.
        numbers: The job's rank for each initial rank. Errors use it.
        contributed: The initial ranks that took part in the latest operation.
        bucket_bytes: Best bucket size for gradients that are still being computed; 0 for one
            bucket.
        too_few: Set once fewer than ``min_np`` ranks remain. Operations still work; the training
            loop checks it after each step, saves a checkpoint, and raises it.
        sections: Number of sections started so far, the same on all ranks.
        observers: Called after each operation, in the thread that called it.
        reduced_bytes: Total bytes that this rank has passed to ``allreduce``.
        last_error: The latest error of an operation on this rank.
    """

    def __init__(self, transport: Transport, parent: Engine | None = None) -> None:
        self.observers: list[Callable[[FinishedOperation], None]] = []
        self._lock = threading.Lock()
        self._parent = parent
        self.reduced_bytes = 0
        if parent is not None:
            # MPI may take calls of one thread at a time.
            self._lock, self.observers = parent._lock, parent.observers
        self._joined: frozenset[int] = frozenset()  # when some last were; the same on all ranks
        self._external: tuple[Call, float] | None = None  # the call and its start time
        self.sections = 0
        self._section = ""  # the outermost that this rank is in
        # Another rank's error, which ends the section on this one.
        self._section_error: PeerFailedError | None = None
        self.broken: HvdtrainError | None = None
        # By which this rank left an operation last; also one after which it may go on.
        self.last_error: HvdtrainError | None = None
        self.closed = False
        self._parts: list[Engine] = []
        super().__init__(transport)
        self.kind = self.transport.kind
        self.bucket_bytes = self.transport.bucket_bytes
        if parent is not None:
            parent._parts.append(self)

    # Whatever depends on the current ranks must be inside the attempt, which is repeated after a
    # loss.

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum", *, name: str = "") -> np.ndarray:
        """Combine the arrays of all ranks element by element.

        Args:
            array: Same shape and dtype on every rank.
            op: ``average`` needs a floating dtype; ``sum`` and ``average`` reject bool.
            name: Identifies the operation in errors.
        """
        return self.grouped_allreduce([array], op, name=name)[0]

    def grouped_allreduce(
        self,
        arrays: Sequence[np.ndarray],
        op: ReduceOp = "sum",
        *,
        name: str = "",
        require_finite: bool = False,
        wire: str = "none",
    ) -> list[np.ndarray]:
        """Combine several arrays of one dtype in one operation, without concatenating them.

        Args:
            arrays: As for ``allreduce``.
            op: As for ``allreduce``.
            name: Identifies the operation in errors.
            require_finite: Raise ``NonFiniteError`` on every rank if a result contains NaN or
                infinity. The ranks may continue afterwards.
            wire: Format in which float32 arrays cross between hosts, see ``wire_format``. Small
                arrays are not converted.
        """
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
        form = () if wire == "none" or dtype != np.float32 else (wire,)
        call = self._calls.get("allreduce", name, (op, type_name(dtype), shapes, *form))
        check_reducible(dtype, op)
        attempt = functools.partial(self._reduce_arrays, call, arrays, op, require_finite, *form)
        outputs, finite = self._operate(call, attempt)
        self._note_reduced(sum(array.nbytes for array in arrays))
        if finite is not None and not finite.passed:
            raise NonFiniteError(f"The result of {call.text} holds NaN or infinity.")
        return list(outputs)

    def allgather(self, array: np.ndarray, *, name: str = "") -> np.ndarray:
        """Concatenate the arrays of all ranks along the first axis; first dimensions may differ."""
        array = with_rows(array, "allgather")
        row = array.shape[1:]
        call = self._calls.get("allgather", name, (type_name(array.dtype), row))

        def attempt() -> np.ndarray:
            counts = self._counts(call, [array.shape[0]])[:, 0]
            result = np.empty((int(counts.sum()), *row), array.dtype)
            byte_counts = [int(count) * row_bytes(array) for count in counts]
            self.transport.gather_bytes(as_bytes(array), as_bytes(result), byte_counts)
            return result

        return self._operate(call, attempt)

    def broadcast(
        self, array: np.ndarray, root: int = 0, *, name: str = "", replicated: bool = False
    ) -> np.ndarray:
        """Return the array of ``root``; the other ranks pass an array of its shape and dtype.

        With ``replicated=True`` all ranks hold the same value, so any rank can replace a lost root.
        """
        array = plain(np.asarray(array), "broadcast")
        detail = (type_name(array.dtype), array.shape)

        def attempt(call: Call, root: int) -> np.ndarray:
            self._agree(call)
            result = array.copy()
            self.transport.broadcast_bytes(as_bytes(result), root)
            return result

        return self._from_root(attempt, "broadcast", name, root, replicated, detail)

    def reduce_scatter(
        self, array: np.ndarray, op: ReduceOp = "sum", *, name: str = ""
    ) -> np.ndarray:
        """Combine the arrays of all ranks and return this rank's share of the first axis.

        The first ``n % size`` ranks get one more row if ``n`` rows don't divide evenly.
        """
        array = with_rows(array, "reduce_scatter")
        check_reducible(array.dtype, op)
        call = self._calls.get("reduce_scatter", name, (op, type_name(array.dtype), array.shape))

        return self._operate(call, lambda: self._reduce_rows(call, array, op))

    def alltoall(
        self, array: np.ndarray, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[np.ndarray, list[int]]:
        """Send ``splits[r]`` rows to each rank ``r``.

        Without ``splits`` the rows must divide evenly.

        Returns:
            The received rows, and the number of rows from each rank.
        """
        array = with_rows(array, "alltoall")
        members = self.members
        counts = check_splits(array.shape[0], splits, len(members))
        parts = dict(zip(members, np.split(array, np.cumsum(counts)[:-1])))
        call = self._calls.get("alltoall", name, (type_name(array.dtype), array.shape[1:]))

        def attempt() -> tuple[np.ndarray, list[int]]:
            kept = [parts[member] for member in self.members]
            data = array if self.members == members else np.concatenate(kept)
            counts = [part.shape[0] for part in kept]
            received = self._counts(call, counts)[:, self.rank]
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
        """Wait until every rank has called this."""
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
        """Return the object of ``root``; ``replicated`` as in ``broadcast``.

        ``codec="json"`` accepts what JSON can represent. ``"pickle"`` accepts any object, but lets
        the sender run code on the receivers: use it only if you trust all ranks.
        """
        data = encode(obj if replicated or self.rank == root else None, codec)

        def attempt(call: Call, root: int) -> np.ndarray:
            counts = self._counts(call, [data.size])
            buffer = np.empty(int(counts[root, 0]), np.uint8)
            if self.rank == root:
                buffer[:] = data
            self.transport.broadcast_bytes(buffer, root)
            return buffer

        row = self._from_root(attempt, "broadcast_object", name, root, replicated, (codec,))
        return decode(row, codec)

    def allgather_object(
        self, obj: Any, *, name: str = "", note: str = "", codec: Codec = "json"
    ) -> list[Any]:
        """Return the objects of all ranks in rank order; ``codec`` as in ``broadcast_object``.

        ``note`` is added to the error of a mismatch; it may differ between ranks.
        """
        data = encode(obj, codec)
        call = self._calls.get("allgather_object", name, (codec,), note)
        parts = self._operate(call, lambda: self._exchange_parts(call, data))
        # One that has joined has none.
        return [decode(part, codec) for part in parts if part.size]

    def join(self) -> int:
        """Take part in the operations of the other ranks until all ranks have called this.

        For a rank that has run out of data. Until the last rank joins, the others may call
        ``allreduce``, to which a joined rank contributes zeros (nothing for "min", "max" and
        "product"; "average" still divides by ``size``), and ``allgather_object``, which omits it.

        Returns:
            The last rank that joined; the highest one if several joined together.

        Raises:
            ConfigurationError: The job is elastic.
            MismatchError: A rank called another operation in the meantime.
        """
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
        """Open a channel for point-to-point messages; collective.

        Raises:
            ConfigurationError: This process trains alone.
        """
        call = self._calls.get("messages", "", ())

        def attempt() -> PointToPoint:
            self._agree(call)
            return self.transport.messages()

        return self._operate(call, attempt)

    def share(self, nbytes: int) -> dict[int, np.ndarray]:
        """Allocate memory that all ranks of this host can access; collective.

        Args:
            nbytes: Bytes for this rank, may be 0 and differ between ranks.

        Returns:
            The memory of each rank of this host by initial rank: uint8, zero, aligned to 64 bytes.
            Writes become visible in program order. Empty if the ranks can't share memory.
        """
        host, name = self.transport.host, "shared memory"
        if host is None:
            return {}
        # Whole cache lines: ranks don't write to one another's.
        asked = self.allgather_object([self.member, host, aligned(nbytes)], name=name)
        sizes = {member: size for member, theirs, size in asked if theirs == host}

        def tell(path: str) -> str:
            paths = dict(self.allgather_object([self.member, path], name=name))
            return paths.get(min(sizes), "")

        def agree(mapped: bool) -> bool:
            everyone = self.allgather_object([self.member, mapped], name=name)
            return all(mapped for member, mapped in everyone if member in sizes)

        parts = list(sizes.values())
        file = share_file(parts, list(sizes).index(self.member), tell, agree)
        return {} if file is None else dict(zip(sizes, file.cut(parts)))

    def subset(self, ranks: Sequence[int]) -> Engine | None:
        """Create an engine for some of the ranks; collective over all ranks.

        Args:
            ranks: At least one rank, without duplicates; the same on every rank.

        Returns:
            The engine, with ranks renumbered from 0 in ascending order, or None on other ranks.
            Errors use the job's ranks. The engine lives as long as its parent.

        Raises:
            ConfigurationError: ``ranks`` is invalid, or the job is elastic.
        """
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

    @contextmanager
    def section(self, name: str, detail: tuple[Any, ...] = ()) -> Iterator[None]:
        """Start a block together on all ranks and leave it together, even after an error.

        If the block fails on some ranks only, the other ranks raise ``PeerFailedError`` with that
        error in their next operation. Afterwards all ranks may start another section. A nested
        section only checks that all ranks start it.

        Args:
            name: Identifies the section in errors.
            detail: Further values that must be equal on all ranks; their ``str`` is compared.

        Raises:
            MismatchError: Another rank made a different call.
        """
        begin = self._calls.get("begin", name, detail)
        try:
            self._operate(begin, lambda: self._agree(begin))
        except HvdtrainError as error:
            if self.broken is not None:
                self.fail(reason_of(error))
            raise
        if self._section:
            yield
            return
        self.sections += 1
        self._section, self._section_error = name, None
        try:
            yield
            with self.without_timeout():
                self.barrier(name=f"end of {name}")
        except BaseException as error:
            self._leave_section(error)
            others = self._section_error
            if others is None or isinstance(error, HvdtrainError) or str(others) not in str(error):
                raise
            # What TensorFlow has made of it.
            raise others from error
        finally:
            self._section, self._section_error = "", None

    def _leave_section(self, error: BaseException) -> None:
        """Let the other ranks leave the section as well, unless all leave it alike."""
        if self._section_error is not None or self.closed or isinstance(error, Preempted):
            return
        if isinstance(error, SystemExit):
            # The other ranks see the end of the program. If someone catches this, it must end too.
            self._break(error, self._section)
            return
        reason = reason_of(error)
        call = self._calls.get(RAISED, self._section, (), reason)
        try:
            if self.broken is None:
                with (
                    suppress(HvdtrainError),
                    warn_if_late(f"rank {self.number} failed in {self._section}: {reason}"),
                ):
                    self._operate(call, lambda: self._agree(call))
        finally:
            if self.broken is not None:
                self.fail(reason)

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """End the job if the block fails. For blocks in which ranks call no collectives.

        Must be used inside a section. All ranks get errors from then on, including ranks that wait
        for messages.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Preempted):  # all ranks end
                self._break(error, self._section)
            raise

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Disable the time-out of operations in the block; failed ranks are still errors."""
        with self.transport.without_timeout():
            yield

    def begin_external(self, kind: str, name: str, detail: tuple[Any, ...]) -> None:
        """Agree with all ranks on an operation that another library will carry out.

        Args:
            kind: Kind of operation.
            name: Identifies the operation in errors.
            detail: Further values that must be equal on all ranks; their ``str`` is compared.

        Raises:
            MismatchError: Another rank made a different call.
        """
        call = self._calls.get(kind, name, detail)

        def attempt() -> None:
            if self._external is not None:
                raise CollectiveError(
                    f"Rank {self.number} begins {call.short_text} before the end of "
                    f"{self._external[0].short_text}, which an error has ended. End the program."
                )
            self._agree(call)
            self._external = call, time.monotonic()

        self._operate(call, attempt)

    def check_external(self) -> None:
        """Check that the other ranks can still reach the external operation; called periodically.

        Raises:
            PeerFailedError: A rank has failed or has ended its program.
            CollectiveTimeoutError: The operation takes too long.
        """
        with self._lock:
            if self._external is None:
                return
            call, start_s = self._external
            try:
                self.transport.look_for_others(call.short_text, time.monotonic() - start_s)
            except HvdtrainError as error:
                self._remember(error)
                raise

    def end_external(self, reduced_bytes: int = 0) -> None:
        """Record the end of the external operation.

        Args:
            reduced_bytes: Bytes that this rank contributed, if it was an allreduce.
        """
        with self._lock:
            external, self._external = self._external, None
        if external is not None:
            self._note_reduced(reduced_bytes)
            self._tell_observers(*external, 0.0, "")

    def fail(self, reason: str) -> None:
        """Notify all ranks that this rank has failed; they raise ``PeerFailedError``.

        Returns once they know, or after a few seconds. Never raises.
        """
        self.transport.fail(reason)

    def close(self) -> None:
        """Reject further operations and free resources. All ranks must call it, or none."""
        for part in list(self._parts):
            part.close()
        if self.closed:
            return
        self.closed = True
        if self._parent is not None:
            self._parent._parts.remove(self)
        self.transport.close()
        # Another thread may be inside an operation; an unfinished one may still use its buffers.
        if self._lock.acquire(timeout=self.transport.timeout_s):
            try:
                if self.broken is None:
                    self.transport.free()
            finally:
                self._lock.release()

    # Bookkeeping.

    def _from_root(
        self,
        attempt: Callable[[Call, int], np.ndarray],
        kind: str,
        name: str,
        root: int,
        replicated: bool,
        detail: tuple[Any, ...],
    ) -> np.ndarray:
        """Give all ranks what one has; ``attempt`` takes the call and that one's rank of now."""
        check_root(root, self.size)
        source = self.members[root]
        more = (*detail, "replicated") if replicated else detail

        def attempt_now() -> np.ndarray:
            # The chief takes the place of one that is lost.
            root = self.members.index(source) if source in self.members else 0
            return attempt(self._calls.get(kind, name, (root, *more)), root)

        call = self._calls.get(kind, name, (root, *more))
        return self._operate(call, attempt_now, -1 if replicated else source)

    @property
    def waited_s(self) -> float:
        """The time this rank has waited for others in all, in seconds; short waits don't count."""
        return self.transport.waited_s

    def _note_reduced(self, nbytes: int) -> None:
        self.reduced_bytes += nbytes
        if self._parent is not None:
            self._parent._note_reduced(nbytes)

    def _operate(self, call: Call, attempt: Callable[[], Result], source: int = -1) -> Result:
        """Carry out one operation at a time; none after an error that ranks may not all have had.

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
        except BaseException as raised:
            error = raised
            if isinstance(raised, RanksRaised):
                error = self._section_error = PeerFailedError(
                    f"{raised.text}. Rank {self.number} was waiting for it in {call.short_text} "
                    "and stops too."
                )
            left_by = f"{type(error).__name__}: {error}"
            self._remember(error)
            if error is raised:
                raise
            raise error from None
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
        refused = self.broken or (self._section_error if self._section else None)
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
        """Carry an operation out once more, to which those that have joined add nothing."""
        self._joined = some.ranks
        try:
            joined = self.rank in some.ranks
            asked = self._call_of_others(call, joined)
            check_can_join(asked, sorted(some.ranks))
        except MismatchError:
            self._joined = frozenset()
            raise
        if not joined:
            return attempt()
        self._add_neutral(asked)
        raise some

    def _remember(self, error: BaseException) -> None:
        if self.closed:
            return
        if isinstance(error, HvdtrainError):
            self.last_error = error
        # Ranks that are told that they differ, or what is lost, all leave the operation alike.
        if error is self._section_error:
            return
        if isinstance(error, (ConfigurationError, MismatchError, RanksLostError, SomeJoined)):
            return
        if isinstance(error, HvdtrainError):
            self.broken = error
        else:
            self._break(error, "an operation")

    def _break(self, error: BaseException, what: str) -> None:
        """Refuse further operations, as this rank is not in step with the others any more."""
        if self.size > 1 and self.broken is None:
            self.broken = CollectiveError(
                f"Rank {self.number} left {what} before its end ({type(error).__name__}: {error}) "
                "and is no longer in step with the other ranks. End the program."
            )
            # Its frames hold buffers that MPI may still write to.
            self.broken.__cause__ = error
