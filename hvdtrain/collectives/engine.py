"""Collectives between the ranks of a job: NumPy arrays in, NumPy arrays out.

Every rank calls the same operations in the same order. The engine checks this: if operation, name,
shape or dtype differ, every rank raises ``MismatchError``. The results of ``allreduce`` are bitwise
identical on all ranks. float16 and bfloat16 are summed in float32.

In an elastic job, the other ranks continue after a rank dies. The operation in which the loss is
detected succeeds, and ``rank``, ``size`` and ``members`` change. Either all remaining ranks get a
result that includes the contributions of the lost ranks, or the operation is repeated without them:

- ``allreduce`` combines the arrays of the remaining ranks; ``average`` divides by their number.
- ``allgather`` and ``allgather_object`` omit the lost ranks.
- ``broadcast`` and ``broadcast_object`` raise ``RanksLostError`` on every rank if the root was lost
  before all ranks had its value. The ranks may continue afterwards. With ``replicated=True`` they
  get the chief's value instead of an error.
- ``reduce_scatter`` divides the result among the remaining ranks.
- ``alltoall`` drops the rows for lost ranks.

Arguments such as ``root`` refer to the current ranks. Some code stores data for each rank, or data
that depends on the number of ranks. Before this code uses the data, it must check that
``generation`` has not changed. After an operation, ``generation`` may already have grown on one
rank but not on another, which learns of the loss in its next operation. So if all ranks must make
the same decision, reduce ``generation`` with "max" first.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hvdtrain.collectives.calls import (
    JOIN,
    RAISED,
    Call,
    Codec,
    SomeJoined,
    as_bytes,
    check_ranks,
    check_root,
    check_splits,
    decode,
    encode,
    make_call,
    plain,
    row_bytes,
    type_name,
    with_rows,
)
from hvdtrain.collectives.engine_core import EngineCore
from hvdtrain.collectives.fusion import aligned
from hvdtrain.collectives.kernels import ReduceOp, check_reducible
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.shared_file import share_file
from hvdtrain.collectives.transport import Transport
from hvdtrain.errors import (
    CollectiveError,
    ConfigurationError,
    HvdtrainError,
    NonFiniteError,
    Preempted,
)

__all__ = ["Engine", "error_location", "single_engine"]

logger = logging.getLogger(__package__)

PACKAGE = str(Path(__file__).parents[1])
# A rank that leaves a section with an error logs the error if the other ranks take longer than this
# to notice it.
LATE_S = 5.0


def single_engine() -> Engine:
    """Return the engine of a process that trains alone."""
    return Engine(Transport())


class Engine(EngineCore):
    """Collectives between all or some ranks of the job.

    ``name`` identifies an operation in error messages. All ranks must pass the same name. Input
    arrays are never modified, and the caller may modify result arrays.

    Args:
        transport: Moves the bytes. The engine opens the transport.
        parent: The engine of all ranks, if this engine connects a subset of them.

    Attributes:
        kind: Name of the transport.
        rank: Number of this rank among the remaining ranks. The chief is number 0.
        size: Number of remaining ranks.
        survives_losses: Whether the other ranks continue after a rank dies.
        generation: Number of times that ranks have been lost.
        members: The initial rank of each remaining rank, in order. A rank keeps its initial rank
            when other ranks are lost. The launcher and point-to-point messages use initial ranks.
        numbers: The job's rank for each initial rank. An engine that connects a subset numbers its
            initial ranks from 0, so they may differ from the job's ranks. Error messages use the
            job's ranks.
        contributed: The ranks that took part in the latest operation, as initial ranks.
        bucket_bytes: Best size of the buckets in which gradients are reduced while other gradients
            are still being computed. 0 means a single bucket for all gradients.
        too_few: An exception once fewer than ``min_np`` ranks remain, otherwise None. Operations
            still work. The training loop checks ``too_few`` after each step, saves a checkpoint,
            and raises the exception.
        sections: Number of ``section`` blocks started so far, the same on all ranks.
        observers: Functions that are called after each operation, in the thread of the operation.
        before_operation: Function that is called before each operation and at the end, in the
            thread of the caller. It may wait for operations that another thread will start.
        reduced_bytes: Total bytes that this rank has passed to ``allreduce``.
        last_error: The latest error that an operation raised on this rank.
    """

    def __init__(self, transport: Transport, parent: Engine | None = None) -> None:
        super().__init__(transport)
        self.kind = self.transport.kind
        self.bucket_bytes = self.transport.bucket_bytes
        self.reduced_bytes = 0
        self.sections = 0
        self._external: tuple[Call, float] | None = None  # the call and its start time
        self._external_wait_s: float | None = None  # when this rank began to wait for the others
        self._parent = parent
        self._parts: list[Engine] = []
        if parent is not None:
            # MPI may only accept calls from one thread at a time.
            self._lock, self.observers = parent._lock, parent.observers
            parent._parts.append(self)

    # In the methods below, ``attempt`` is repeated after a loss. So it must contain all code that
    # depends on the ranks.

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum", *, name: str = "") -> np.ndarray:
        """Combine the arrays of all ranks element by element.

        All arrays must have the same shape and dtype. ``average`` requires a floating dtype, and
        ``sum`` does not accept bool.
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
            wire: Format in which float32 arrays are sent between hosts: a name that ``wire_format``
                accepts. Small arrays are not converted.
        """
        arrays = [np.asarray(array, order="C") for array in arrays]
        if not arrays:
            return []
        dtype = arrays[0].dtype
        if any(array.dtype != dtype for array in arrays):
            received = ", ".join(sorted({str(array.dtype) for array in arrays}))
            raise ConfigurationError(
                f"A grouped allreduce needs arrays of one dtype, got {received}; make one call for "
                "each dtype."
            )
        shapes = tuple(array.shape for array in arrays)
        form = () if wire == "none" or dtype != np.float32 else (wire,)
        call = make_call("allreduce", name, (op, type_name(dtype), shapes, *form))
        check_reducible(dtype, op)
        attempt = functools.partial(self._reduce_arrays, call, arrays, op, require_finite, *form)
        outputs, finite = self._operate(call, attempt)
        self._note_reduced(sum(array.nbytes for array in arrays))
        if finite is not None and not finite.passed:
            raise NonFiniteError(f"The result of {call.text} contains NaN or infinity.")
        return list(outputs)

    def allgather(self, array: np.ndarray, *, name: str = "") -> np.ndarray:
        """Concatenate the arrays of all ranks along the first axis.

        The size of the first axis may differ between ranks.
        """
        array = with_rows(array, "allgather")
        row = array.shape[1:]
        call = make_call("allgather", name, (type_name(array.dtype), row))

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
        """Return the array of ``root`` on all ranks.

        The other ranks pass an array of the same shape and dtype. Pass ``replicated=True`` if the
        arrays of all ranks are equal. If the root is lost, the chief then replaces it.
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
        call = make_call("reduce_scatter", name, (op, type_name(array.dtype), array.shape))

        return self._operate(call, lambda: self._reduce_rows(call, array, op))

    def alltoall(
        self, array: np.ndarray, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[np.ndarray, list[int]]:
        """Send ``splits[r]`` rows to each rank ``r``.

        Without ``splits``, every rank gets the same number of rows.

        Returns:
            The received rows, and the number of rows from each rank.
        """
        array = with_rows(array, "alltoall")
        members = self.members
        counts = check_splits(array.shape[0], splits, len(members))
        parts = dict(zip(members, np.split(array, np.cumsum(counts)[:-1])))
        call = make_call("alltoall", name, (type_name(array.dtype), array.shape[1:]))

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
        call = make_call("barrier", name)
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
        """Return the object of ``root`` on all ranks.

        ``replicated`` has the same meaning as in ``broadcast``. ``codec="json"`` accepts what JSON
        can represent. ``"pickle"`` accepts any object, but lets the sender run code on the
        receivers, so use it only if you trust all ranks.
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
        """Return the objects of all ranks in rank order.

        ``codec`` has the same meaning as in ``broadcast_object``. ``note`` may differ between
        ranks, and is added to the error if the ranks made different calls.
        """
        data = encode(obj, codec)
        call = make_call("allgather_object", name, (codec,), note)
        parts = self._operate(call, lambda: self._exchange_parts(call, data))
        # Ranks that have joined contribute no object.
        return [decode(part, codec) for part in parts if part.size]

    def join(self) -> int:
        """Take part in the operations of the other ranks until all ranks have called this.

        A rank calls this when it has run out of data. Until all ranks have joined, the other ranks
        may call ``allreduce`` and ``allgather_object``. In ``allreduce``, a joined rank contributes
        zeros to "sum" and "average", and nothing to other values of ``op``. "average" still divides
        by ``size``. The result of ``allgather_object`` omits joined ranks.

        Returns:
            The last rank that joined. If several ranks joined last, at the same time, the result is
            the highest of these ranks.

        Raises:
            ConfigurationError: If the job is elastic.
            MismatchError: If another rank called an operation that needs all ranks.
        """
        if self.survives_losses:
            raise ConfigurationError(
                "join is not supported in elastic jobs. Start the job with --no-elastic."
            )
        call = make_call(JOIN, "")
        while True:
            try:
                self._operate(call, lambda: self._agree(call))
            except SomeJoined:
                continue
            last = max(set(range(self.size)) - self._joined)
            self._joined = frozenset()
            return last

    def messages(self) -> PointToPoint:
        """Open a channel for point-to-point messages.

        All ranks must call this.

        Raises:
            ConfigurationError: If this process trains alone.
        """
        call = make_call("messages", "")

        def attempt() -> PointToPoint:
            self._agree(call)
            return self.transport.messages()

        return self._operate(call, attempt)

    def share(self, nbytes: int) -> dict[int, np.ndarray]:
        """Allocate memory that all ranks of this host can access.

        All ranks of the job must call this. Each passes the size of its part.

        Returns:
            A dict with a part of the memory for each rank of this host. The keys are initial ranks.
            Each part is a uint8 array of zeros, aligned to 64 bytes, with the size that its rank
            has passed. Other ranks see a rank's writes in the order in which the rank made them. If
            the ranks can't share memory, the dict is empty.
        """
        host, name = self.transport.host, "shared memory"
        if host is None:
            return {}
        # Whole cache lines, so that ranks don't write to the same line.
        requests = self.allgather_object([self.member, host, aligned(nbytes)], name=name)
        sizes = {member: size for member, its_host, size in requests if its_host == host}

        def broadcast_path(path: str) -> str:
            paths = dict(self.allgather_object([self.member, path], name=name))
            return paths.get(min(sizes), "")

        def all_true(mapped: bool) -> bool:
            everyone = self.allgather_object([self.member, mapped], name=name)
            return all(mapped for member, mapped in everyone if member in sizes)

        parts = list(sizes.values())
        file = share_file(parts, list(sizes).index(self.member), broadcast_path, all_true)
        return {} if file is None else dict(zip(sizes, file.cut(parts)))

    def subset(self, ranks: Sequence[int]) -> Engine | None:
        """Create an engine for some of the ranks.

        All ranks must call this, even if they are not in ``ranks``.

        Returns:
            The engine, whose ranks are renumbered from 0 in ascending order, or None on ranks that
            are not in ``ranks``. Error messages use the job's ranks. Closing the parent also closes
            this engine.

        Raises:
            ConfigurationError: If ``ranks`` is invalid, or the job is elastic.
        """
        ordered = check_ranks(ranks, self.size)
        if self.survives_losses:
            raise ConfigurationError(
                "Subsets of ranks are not supported in elastic jobs. Start the job with "
                "--no-elastic."
            )
        call = make_call("subset", "", ordered)

        def attempt() -> Engine | None:
            self._agree(call)
            transport = self.transport.subset(ordered)
            return None if transport is None else Engine(transport, self)

        return self._operate(call, attempt)

    @contextmanager
    def section(self, name: str, detail: tuple[Any, ...] = ()) -> Iterator[None]:
        """Enter and leave a block together on all ranks, even if the block fails on some ranks.

        If the block fails on only some ranks, the other ranks raise ``PeerFailedError``, which
        contains the error, in their next operation. Afterwards all ranks may start another section.
        A nested section only checks that all ranks start it. ``detail`` contains values whose
        ``str`` must be equal on all ranks.

        Raises:
            MismatchError: If another rank made a different call.
        """
        begin = make_call("begin", name, detail)
        try:
            self._operate(begin, lambda: self._agree(begin))
        except HvdtrainError as error:
            if self.broken is not None:
                self.fail(_error_text(error))
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
            # The framework has wrapped the error of the other rank.
            raise others from error
        finally:
            self._section, self._section_error = "", None

    def _leave_section(self, error: BaseException) -> None:
        """Make the other ranks leave the section too, unless all ranks are already leaving it."""
        if self._section_error is not None or self.closed or isinstance(error, Preempted):
            return
        if isinstance(error, SystemExit):
            # The other ranks notice the end of the program. If a caller catches the exception, this
            # rank can't continue.
            self._break(error, self._section)
            return
        reason = _error_text(error)
        call = make_call(RAISED, self._section, (), reason)
        text = f"rank {self.number} failed in {self._section}: {reason}"
        timer = threading.Timer(LATE_S, logger.warning, [text])
        timer.daemon = True
        try:
            if self.broken is None:
                timer.start()
                with suppress(HvdtrainError):
                    self._operate(call, lambda: self._agree(call))
        finally:
            timer.cancel()
            if self.broken is not None:
                self.fail(reason)

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """End the job if the block fails.

        Use this inside a section, for a block in which ranks call no collectives. After a failure,
        operations raise errors on all ranks, including ranks that wait for messages.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Preempted):  # all ranks stop together
                self._break(error, self._section)
            raise

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Disable the time-out of operations in the block. Failed ranks still raise an error."""
        with self.transport.without_timeout():
            yield

    def begin_external(self, kind: str, name: str, detail: tuple[Any, ...]) -> None:
        """Check that all ranks start the same operation of another library.

        The arguments must be equal on all ranks, as in ``section``. From now on, this rank counts
        as waiting for the other ranks, until it calls ``pause_external`` or ``end_external``.

        Raises:
            MismatchError: If another rank made a different call.
        """
        call = make_call(kind, name, detail)

        def attempt() -> None:
            if self._external is not None:
                raise CollectiveError(
                    f"Rank {self.number} started {call.short_text} after "
                    f"{self._external[0].short_text} failed. End the program."
                )
            self._agree(call)
            self._external = call, time.monotonic()
            self._external_wait_s = time.monotonic()

        self._operate(call, attempt)

    def pause_external(self) -> None:
        """Record that this rank no longer waits within the external operation, but computes."""
        with self._lock:
            self._external_wait_s = None

    def resume_external(self) -> None:
        """Record that this rank waits for the other ranks again, after ``pause_external``."""
        with self._lock:
            self._external_wait_s = time.monotonic()

    def check_external(self) -> None:
        """Check that no rank prevents the external operation from completing.

        The caller must call this periodically while the operation runs.

        Raises:
            PeerFailedError: If a rank has failed or has ended its program.
            CollectiveTimeoutError: If this rank has waited for longer than the time-out.
        """
        with self._lock:
            if self._external is None:
                return
            since_s = self._external_wait_s
            waited_s = None if since_s is None else time.monotonic() - since_s
            try:
                self.transport.check_peers(self._external[0].short_text, waited_s)
            except HvdtrainError as error:
                self._remember(error)
                raise

    def end_external(self, reduced_bytes: int = 0) -> None:
        """Record the end of the external operation.

        If the operation was an allreduce, ``reduced_bytes`` is the size of this rank's arrays.
        """
        with self._lock:
            external, self._external = self._external, None
        if external is not None:
            self._note_reduced(reduced_bytes)
            self._notify_observers(*external, 0.0, "")

    def fail(self, reason: str) -> None:
        """Notify all ranks that this rank has failed, so that they raise ``PeerFailedError``.

        This method returns once all ranks know, or after a time-out. It never raises.
        """
        self.transport.fail(reason)

    def close(self) -> None:
        """Reject further operations and free resources. If one rank does this, all must."""
        for part in list(self._parts):
            part.close()
        if self.closed:
            return
        self.before_operation()
        self.closed = True
        if self._parent is not None:
            self._parent._parts.remove(self)
        self.transport.close()
        # Another thread may be inside an operation that still uses the buffers.
        if self._lock.acquire(timeout=self.transport.timeout_s):
            try:
                if self.broken is None:
                    self.transport.free()
            finally:
                self._lock.release()

    def _from_root(
        self,
        attempt: Callable[[Call, int], np.ndarray],
        kind: str,
        name: str,
        root: int,
        replicated: bool,
        detail: tuple[Any, ...],
    ) -> np.ndarray:
        """Run an operation in which one rank, the root, sends data to all others."""
        check_root(root, self.size)
        source = self.members[root]
        detail = (*detail, "replicated") if replicated else detail

        def attempt_from_source() -> np.ndarray:
            # The chief replaces a lost root.
            root = self.members.index(source) if source in self.members else 0
            return attempt(make_call(kind, name, (root, *detail)), root)

        call = make_call(kind, name, (root, *detail))
        return self._operate(call, attempt_from_source, -1 if replicated else source)

    def _note_reduced(self, nbytes: int) -> None:
        self.reduced_bytes += nbytes
        if self._parent is not None:
            self._parent._note_reduced(nbytes)


def _error_text(error: BaseException) -> str:
    """Return the type, the message and the location of an error as text."""
    return f"{type(error).__name__}: {error}{error_location(error.__traceback__)}"[:2000]


def error_location(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's program in a traceback, or of any if none."""
    frames = traceback.extract_tb(trace)
    if not frames:
        return ""
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not frame.filename.startswith(PACKAGE)
    ]
    frame = (own or frames)[-1]
    return f" ({frame.filename}:{frame.lineno})"
