"""Process sets: collectives among some of the ranks, under Horovod's names; and ``init``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain import world
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ConfigurationError
from hvdtrain.tensorflow.device_collectives import DeviceCollectives
from hvdtrain.tensorflow.tf_errors import raise_as_in_tensorflow, refusal

__all__ = [
    "ProcessSet",
    "add_process_set",
    "find_process_set",
    "global_process_set",
    "init",
    "remove_process_set",
]


class ProcessSet:
    """Some of the ranks, to be passed as ``process_set``.

    It can be used after ``add_process_set``, or where it was passed to ``init``; until then, and
    after ``remove_process_set``, ``size`` and ``rank`` return None.

    Args:
        ranks_or_comm: Numbers of ranks in the job; or a communicator of mpi4py that holds them.

    Attributes:
        process_set_id: Its number, the same on all ranks; None if it can't be used.

    Raises:
        ValueError: They are neither.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        chosen = _ranks_of(ranks_or_comm)
        if chosen is None or any(type(rank) is not int for rank in chosen):
            raise ValueError(
                f"A ProcessSet takes numbers of ranks, or a communicator of mpi4py; received "
                f"{ranks_or_comm!r}."
            )
        self._ranks = sorted(chosen)
        self.process_set_id: int | None = None
        self._whole: Engine | None = None
        self._part: Engine | None = None

    @property
    def ranks(self) -> list[int]:
        """Numbers of its ranks in the job, in order."""
        return list(self._ranks)

    def size(self) -> int | None:
        """Return how many ranks it has; None if it can't be used."""
        return len(self.ranks) if self._usable else None

    def rank(self) -> int | None:
        """This rank's number among its ranks, from 0; None if it can't be used.

        Raises:
            ConfigurationError: This rank is none of them.
        """
        return self.collectives().rank if self._usable else None

    @property
    def alone(self) -> bool:
        """Whether there is no other rank for this one to combine anything with."""
        return not self.included() or len(self.ranks) == 1

    def included(self) -> bool:
        """Whether this rank is one of them."""
        return world.collectives().rank in self.ranks

    def collectives(self) -> Engine:
        """The engine of its ranks.

        Raises:
            ConfigurationError: It can't be used, or not by this rank.
        """
        if not self._usable:
            raise refusal(
                f"{self} can't be used yet, or no longer. Pass it to add_process_set on all ranks, "
                "or to init."
            )
        if self._part is None:
            raise refusal(
                f"Rank {world.collectives().rank} called a collective of {self}, to which it "
                "doesn't belong. Call it where process_set.included() is true."
            )
        return self._part

    def device_collectives(self) -> DeviceCollectives | None:
        """Return what combines its ranks' tensors where they are; None if nothing does."""
        return None

    def place_of(self, rank: int) -> int:
        """The number that a rank of the job has in it.

        Raises:
            ConfigurationError: It doesn't belong to it.
        """
        if rank not in self.ranks:
            raise refusal(f"Rank {rank} does not belong to {self}.")
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"ProcessSet(ranks={self.ranks}, process_set_id={self.process_set_id})"

    @property
    def _usable(self) -> bool:
        # After shutdown() and another init() the ranks have another engine.
        return self._whole is not None and self._whole is world.collectives()

    def _open(self, number: int) -> None:
        whole = world.collectives()
        self._part = whole.subset(self.ranks)
        self._whole, self.process_set_id = whole, number

    def _close(self) -> None:
        if self._part is not None:
            self._part.close()
        self._whole = self._part = self.process_set_id = None


class _Everyone(ProcessSet):
    """The process set of all ranks, which is always there."""

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(world.collectives().size)) if world.is_initialized() else []

    @property
    def _usable(self) -> bool:
        return world.is_initialized()

    def collectives(self) -> Engine:
        return world.collectives()

    def device_collectives(self) -> DeviceCollectives | None:
        return world.device_collectives()

    def place_of(self, rank: int) -> int:
        return rank


global_process_set: ProcessSet = _Everyone()
_added: list[ProcessSet] = []


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Do what ``hvdtrain.init()`` does, and make process sets usable; further calls do nothing.

    Args:
        comm: None: a job has all ranks that its launcher started. A process set holds some.
        process_sets: Those of the job; the same on every rank. "dynamic" asks for what is always
            so: more can be added later.

    Raises:
        ConfigurationError: Some of the ranks were asked for, or what is no process set.
    """
    if comm is not None:
        raise ConfigurationError(
            f"Received comm={comm!r}; expected None: the job has all ranks that were started. Make "
            "a ProcessSet of those that are to work together, and pass it to init or "
            "add_process_set."
        )
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigurationError(
                f"Received process_sets={process_sets!r}; expected a list of ProcessSet, or "
                '"dynamic".'
            )
        process_sets = None
    if world.is_initialized():
        return
    world.init()
    for process_set in process_sets or ():
        add_process_set(process_set)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Let ranks use a process set; collective over all ranks.

    Args:
        process_set: It, or its ranks; the same on every rank.

    Raises:
        ConfigurationError: There are no such ranks.
        MismatchError: Ranks passed different ones.
        ValueError: There is one with these ranks already.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _added[:] = [entry for entry in _added if entry._usable]
    if any(entry.ranks == process_set.ranks for entry in (global_process_set, *_added)):
        raise ValueError(
            f"There is a process set of the ranks {process_set.ranks} already; use that."
        )
    with raise_as_in_tensorflow():
        process_set._open(1 + max((entry.process_set_id or 0 for entry in _added), default=0))
    _added.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a process set up; all ranks do. Returns whether there was one to give up."""
    if process_set is global_process_set or not process_set._usable:
        return False
    _added.remove(process_set)
    process_set._close()
    return True


def find_process_set(process_set_id: int) -> ProcessSet:
    """The process set with this number.

    Raises:
        ConfigurationError: There is none.
    """
    for entry in (global_process_set, *_added):
        if entry.process_set_id == process_set_id and entry._usable:
            return entry
    raise refusal(
        f"There is no process set with the number {process_set_id}; add_process_set gives numbers."
    )


def _ranks_of(given: Any) -> list[Any] | None:
    """The numbers in the job that are given, or of the ranks of a communicator; None if neither."""
    if isinstance(given, Iterable):
        return list(given)
    mpi: Any = sys.modules.get("mpi4py.MPI")  # who has a communicator has imported it
    if mpi is None or not isinstance(given, mpi.Comm):
        return None
    return list(given.Get_group().Translate_ranks(None, mpi.COMM_WORLD.Get_group()))
