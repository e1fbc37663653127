"""The contract that every collectives engine fulfils: arrays in, arrays out.

Every rank calls the same operations in the same order. An engine checks that they did: a
difference in operation, name, shape or type raises ``MismatchError`` on every rank. Results of
``allreduce`` are bitwise the same on every rank. float16 and bfloat16 are summed in float32.

Where the settings ask for it and MPI can do it, ranks may die at any moment, and the others go
on: the operation in which they are missed ends without an error, and ``rank``, ``size`` and
``members`` are others after it. An operation is either complete with what the dead ranks gave, for
all, or done again as if those that are left had called it alone:

- ``allreduce``: of what they pass; ``average`` divides by how many they are.
- ``allgather``, ``allgather_object``: without the parts of the dead ranks.
- ``broadcast``, ``broadcast_object``: if the root died before all had its value, ``RanksLostError``
  on every rank, after which they may go on; with ``replicated`` the chief's value.
- ``reduce_scatter``: shared out among them, so the shares are larger.
- ``alltoall``: the rows for dead ranks go to nobody.

Numbers of ranks in arguments are those of now. Who keeps something by rank or by size looks at
``generation`` before using it. After the same operation it may have grown on one rank and not yet
on another, which learns of the loss in its next operation: where all have to decide alike, they
reduce it with "max" first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.errors import TooFewRanksError

__all__ = ["OPS", "Codec", "Collectives", "FinishedOperation", "ReduceOp"]

ReduceOp = Literal["sum", "average", "min", "max", "product"]
Codec = Literal["json", "pickle"]

OPS: tuple[ReduceOp, ...] = ("sum", "average", "min", "max", "product")


class FinishedOperation(NamedTuple):
    """An operation that this rank has left.

    Attributes:
        title: Which it was, and its name.
        call: All that ranks had to agree on; the beginning if that is long.
        start_s: When this rank began it, on the monotonic clock.
        stop_s: When it left it.
        waited_s: How long it waited for others meanwhile, where that was for long.
        error: By which it left; empty where it had a result.
    """

    title: str
    call: str
    start_s: float
    stop_s: float
    waited_s: float
    error: str


class Collectives(Protocol):
    """Operations between all ranks of the job.

    ``name`` says in errors what an operation was for; all ranks must pass the same.
    An array that is passed in is never changed; an array that comes back belongs to the caller.

    Attributes:
        kind: Which engine this is.
        rank: This rank's number among those that are left, from 0; that of the chief is 0.
        size: How many ranks are left.
        survives_losses: Whether ranks that die are left behind; otherwise they end the job.
        generation: How often ranks have been left behind; 0 as long as all are there.
        members: The first numbers of the ranks that are left, in order, by which messages and the
            launcher call them.
        numbers: By first number, what errors call a rank: its number in the job.
        bucket_bytes: How much of gradients is best combined at a time while others are still
            computed; 0 where all together.
        too_few: Set when fewer ranks are left than ``min_np`` asks for. Operations go on; who
            trains looks at it after each step, saves what there is to save, and raises it.
        sections: How many sections have begun; the same on all ranks.
        observers: Called after each operation, also of some of the ranks, in the thread that made
            it.
    """

    kind: str
    rank: int
    size: int
    survives_losses: bool
    generation: int
    members: tuple[int, ...]
    numbers: tuple[int, ...]
    contributed: tuple[int, ...]
    bucket_bytes: int
    too_few: TooFewRanksError | None
    sections: int
    observers: list[Callable[[FinishedOperation], None]]

    @property
    def member(self) -> int:
        """This rank's first number, ``members[rank]``, which it keeps when others are lost."""
        ...

    @property
    def waiting_in(self) -> str:
        """The operation in which this rank waits for long, or ""; for other threads to ask."""
        ...

    @property
    def waited_s(self) -> float:
        """The time this rank has waited for others in all, in seconds; short waits don't count."""
        ...

    @property
    def reduced_bytes(self) -> int:
        """The bytes this rank has put into ``allreduce`` in all, also with some of the ranks."""
        ...

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum", *, name: str = "") -> np.ndarray:
        """Combine the arrays of all ranks element by element; same shape and type everywhere.

        ``average`` needs a floating type; ``sum`` and ``average`` of bool are refused.
        """
        ...

    def grouped_allreduce(
        self,
        arrays: Sequence[np.ndarray],
        op: ReduceOp = "sum",
        *,
        name: str = "",
        require_finite: bool = False,
        wire: str = "none",
    ) -> list[np.ndarray]:
        """``allreduce`` of several arrays of one type in one go, without joining them first.

        With ``require_finite`` a NaN or infinity in a result raises ``NonFiniteError`` on every
        rank after all have finished, so that they can go on together. ``wire`` is the form in
        which float32 crosses between hosts, of ``wire_format``; small arrays cross as they are.
        """
        ...

    def allgather(self, array: np.ndarray, *, name: str = "") -> np.ndarray:
        """Concatenate along the first axis, in rank order; first dimensions may differ."""
        ...

    def broadcast(
        self, array: np.ndarray, root: int = 0, *, name: str = "", replicated: bool = False
    ) -> np.ndarray:
        """Give every rank the array of ``root``; the others pass one of its shape and type.

        ``replicated`` says that the value of any rank would do, should the root die.
        """
        ...

    def reduce_scatter(
        self, array: np.ndarray, op: ReduceOp = "sum", *, name: str = ""
    ) -> np.ndarray:
        """Combine, then keep this rank's share of the first axis.

        The first ``n % size`` ranks get one row more when ``n`` rows don't divide evenly.
        """
        ...

    def alltoall(
        self, array: np.ndarray, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[np.ndarray, list[int]]:
        """Send ``splits[r]`` rows to each rank r; returns what came, and how many from each.

        Without ``splits`` the rows are divided evenly, which they must allow.
        """
        ...

    def barrier(self, *, name: str = "") -> None:
        """Return when every rank has arrived."""
        ...

    def broadcast_object(
        self,
        obj: Any,
        root: int = 0,
        *,
        name: str = "",
        codec: Codec = "json",
        replicated: bool = False,
    ) -> Any:
        """Give every rank the object of ``root``; ``replicated`` as in ``broadcast``.

        ``codec="json"`` takes what JSON can hold. ``"pickle"`` takes anything and runs code of
        the sender on the receivers: all ranks must be yours.
        """
        ...

    def allgather_object(
        self, obj: Any, *, name: str = "", note: str = "", codec: Codec = "json"
    ) -> list[Any]:
        """The objects of all ranks in rank order; ``codec`` as in ``broadcast_object``.

        ``note`` is for the error of ranks that make different calls; it may differ itself.
        """
        ...

    def join(self) -> int:
        """Take part in what the other ranks still do, until all of them have called this.

        A rank that has no data left calls it, so that those that have some don't wait in vain.
        Until the last rank comes, they may call ``allreduce``, for which a rank that has joined
        counts as zero (as nothing for "min", "max" and "product"; "average" goes on dividing by
        ``size``), and ``allgather_object``, which leaves it out.

        Returns:
            The rank that was last; the highest of several that came together.

        Raises:
            ConfigurationError: Ranks may be lost in this job.
            MismatchError: Another operation was called meanwhile.
        """
        ...

    def messages(self) -> PointToPoint:
        """A way to send messages to single ranks, by their first numbers; collective.

        Raises:
            ConfigurationError: There are no other ranks.
        """
        ...

    def share(self, nbytes: int) -> dict[int, np.ndarray]:
        """Get memory that the other ranks of this host see; collective.

        Args:
            nbytes: How much of it belongs to this rank; may differ between ranks, or be 0.

        Returns:
            By their first numbers the memory of all ranks of this host, uint8, zero at first,
            aligned to 64 bytes. What is written before another write is seen before that. Empty
            where ranks can't share memory.
        """
        ...

    def subset(self, ranks: Sequence[int]) -> Collectives | None:
        """Operations between some of the ranks alone; collective over all of them.

        Args:
            ranks: At least one, each once; the same on every rank.

        Returns:
            What those ranks use, in which they are counted from 0, lowest first; errors call them
            by their numbers in the job. None on all others. It ends with the job.

        Raises:
            ConfigurationError: There are no such ranks, or the job is elastic.
        """
        ...

    def section(self, name: str, detail: tuple[Any, ...] = ()) -> AbstractContextManager[None]:
        """Begin the block together on all ranks, and leave it together, even by an error.

        An error that leaves the block on some ranks alone is a ``PeerFailedError`` on the others,
        which names it, in the next operation that they call; then all may continue with the
        next section. A section within another only checks that all ranks begin it.

        Args:
            name: What it is.
            detail: What else the ranks must agree on; each part has a text.

        Raises:
            MismatchError: Another rank called something else.
        """
        ...

    def apart(self) -> AbstractContextManager[None]:
        """Let an error in the block, where ranks call no operations together, end the job.

        The block is in a section. All ranks get errors from then on, those that wait for messages
        as well.
        """
        ...

    def patiently(self) -> AbstractContextManager[None]:
        """Let operations in the block wait without a time-out for ranks that are busy.

        A rank that fails or ends is still an error.
        """
        ...

    def begin_external(self, kind: str, name: str, detail: tuple[Any, ...]) -> None:
        """Agree with all ranks on an operation that something else carries out from here on.

        Args:
            kind: What it is.
            name: For errors.
            detail: What else the ranks must agree on; each part has a text.

        Raises:
            MismatchError: Another rank called something else.
        """
        ...

    def check_external(self) -> None:
        """Check that the other ranks can still come to it; called again and again by a thread.

        Raises:
            PeerFailedError: One has failed, or has ended its program.
            CollectiveTimeoutError: It has taken too long.
        """
        ...

    def end_external(self, reduced_bytes: int = 0) -> None:
        """Note that the operation that something else carried out is done.

        Args:
            reduced_bytes: How much this rank has put into it, if it was an allreduce.
        """
        ...

    def fail(self, reason: str) -> None:
        """Tell every other rank that this one can't go on; they raise ``PeerFailedError``.

        Returns when they know, or after a few seconds. Never raises.
        """
        ...

    def close(self) -> None:
        """Refuse further operations; all ranks call it or none, and twice does no harm."""
        ...
