"""Horovod's ``init`` and process sets. A process set runs collectives on some of the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hvdtrain import world
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ConfigurationError
from hvdtrain.job_entry import Framework

if TYPE_CHECKING:
    from hvdtrain.frameworks.tensorflow.device_collectives import DeviceCollectives

__all__ = [
    "ProcessSet",
    "add_process_set",
    "find_process_set",
    "global_process_set",
    "init",
    "init_with",
    "remove_process_set",
]


@contextmanager
def _raise_as_in_framework() -> Iterator[None]:
    """Convert hvdtrain's errors in the ``with`` block to errors that are also TensorFlow's.

    If the program doesn't use TensorFlow, nothing is converted. With PyTorch, Horovod raises
    RuntimeError, and hvdtrain's errors are RuntimeErrors anyway.
    """
    if "tensorflow" not in sys.modules:
        yield
        return
    # Imports TensorFlow, which the program has already done.
    from hvdtrain.frameworks.tensorflow.tf_errors import raise_as_in_tensorflow

    with raise_as_in_tensorflow():
        yield


class ProcessSet:
    """A subset of the ranks, to be passed as ``process_set``.

    Pass the set to ``init`` or ``add_process_set`` before you use it. Until then, and after
    ``remove_process_set``, its ``size`` and ``rank`` return None.

    Args:
        ranks_or_comm: Ranks of the job, or an mpi4py communicator that contains them.

    Attributes:
        process_set_id: Number of the set, which is the same on all ranks. None if the set is not
            usable.

    Raises:
        ValueError: If ``ranks_or_comm`` is neither a list of ranks nor a communicator.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        mpi: Any = sys.modules.get("mpi4py.MPI")  # imported if the caller has a communicator
        if isinstance(ranks_or_comm, Iterable):
            ranks = list(ranks_or_comm)
        elif mpi is not None and isinstance(ranks_or_comm, mpi.Comm):
            group = ranks_or_comm.Get_group()
            ranks = list(group.Translate_ranks(None, mpi.COMM_WORLD.Get_group()))
        else:
            ranks = [None]
        if any(type(rank) is not int for rank in ranks):
            raise ValueError(
                f"ranks_or_comm must be ranks or an mpi4py communicator, got {ranks_or_comm!r}."
            )
        self._ranks = sorted(ranks)
        self.process_set_id: int | None = None
        self._parent: Engine | None = None
        self._collectives: Engine | None = None

    @property
    def ranks(self) -> list[int]:
        """The ranks in this set, numbered as in the whole job and in ascending order."""
        return list(self._ranks)

    def size(self) -> int | None:
        """Return the number of ranks in this set, or None if the set is not usable."""
        return len(self.ranks) if self._usable else None

    def rank(self) -> int | None:
        """Return this rank's index in ``ranks``, or None if the set is not usable.

        Raises:
            ConfigurationError: If the set does not include this rank.
        """
        return self.collectives().rank if self._usable else None

    @property
    def alone(self) -> bool:
        """Whether this rank computes without communication.

        This is the case if this rank is the only one in the set, or if it is not in the set.
        """
        return not self.included() or len(self.ranks) == 1

    def included(self) -> bool:
        """Return whether the set includes this rank."""
        return world.collectives().rank in self.ranks

    @_raise_as_in_framework()
    def collectives(self) -> Engine:
        """Return the engine that runs the collectives of this set.

        Raises:
            ConfigurationError: If the set is not usable, or does not include this rank.
        """
        if not self._usable:
            raise ConfigurationError(
                f"{self} is not usable; pass it to init, or to add_process_set on all ranks."
            )
        if self._collectives is None:
            raise ConfigurationError(
                f"{self} does not include rank {world.collectives().rank}, which called one of its "
                "collectives; check process_set.included() first."
            )
        return self._collectives

    def device_collectives(self) -> DeviceCollectives | None:
        """Return None. Process sets reduce tensors on the host instead of on devices."""
        return None

    @_raise_as_in_framework()
    def group_rank(self, rank: int) -> int:
        """Return the index in ``ranks`` of a rank of the job.

        Raises:
            ConfigurationError: If the set does not include the rank.
        """
        if rank not in self.ranks:
            raise ConfigurationError(f"{self} does not include rank {rank}.")
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"ProcessSet(ranks={self.ranks}, process_set_id={self.process_set_id})"

    @property
    def _usable(self) -> bool:
        # After shutdown() and a new init(), the job has a new engine.
        return self._parent is not None and self._parent is world.collectives()

    def _open(self, process_set_id: int) -> None:
        parent = world.collectives()
        self._collectives = parent.subset(self.ranks)
        self._parent, self.process_set_id = parent, process_set_id

    def _close(self) -> None:
        if self._collectives is not None:
            self._collectives.close()
        self._parent = self._collectives = self.process_set_id = None


class _GlobalProcessSet(ProcessSet):
    """The process set of all ranks. It is usable once ``init`` has been called."""

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

    def group_rank(self, rank: int) -> int:
        return rank


global_process_set: ProcessSet = _GlobalProcessSet()
_added: list[ProcessSet] = []


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start the job like ``hvdtrain.init()``, and add process sets.

    Later calls do nothing.

    Args:
        comm: Must be None, because a job always consists of all ranks that were started.
        process_sets: Process sets, which must be the same on every rank. "dynamic" is accepted but
            has no effect, because sets can always be added later.

    Raises:
        ConfigurationError: If ``comm`` or ``process_sets`` is not supported.
    """
    init_with("tensorflow", comm, process_sets)


def init_with(
    framework: Framework, comm: Any, process_sets: Sequence[ProcessSet] | str | None
) -> None:
    """Start the job of a program that uses ``framework``.

    The other arguments and the errors are the same as in ``init``.
    """
    if comm is not None:
        raise ConfigurationError(
            f"comm must be None, got {comm!r}: a job has all ranks that were started. For a subset "
            "pass a ProcessSet to init or add_process_set."
        )
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigurationError(
                f'process_sets must be a list of ProcessSet or "dynamic", got {process_sets!r}.'
            )
        process_sets = None
    if world.is_initialized():
        return
    world.init(framework)
    for process_set in process_sets or ():
        add_process_set(process_set)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set usable.

    All ranks must call this, including ranks that are not in the set.

    Args:
        process_set: The set or its ranks, which must be the same on every rank.

    Raises:
        ConfigurationError: If the set contains ranks that the job does not have.
        MismatchError: If ranks passed different sets.
        ValueError: If a set with these ranks already exists.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _added[:] = [entry for entry in _added if entry._usable]
    if any(entry.ranks == process_set.ranks for entry in (global_process_set, *_added)):
        raise ValueError(f"A process set of ranks {process_set.ranks} already exists; use that.")
    with _raise_as_in_framework():
        process_set._open(1 + max((entry.process_set_id or 0 for entry in _added), default=0))
    _added.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a process set, and return whether it was usable. All ranks must call this."""
    if process_set is global_process_set or not process_set._usable:
        return False
    _added.remove(process_set)
    process_set._close()
    return True


@_raise_as_in_framework()
def find_process_set(process_set_id: int) -> ProcessSet:
    """Return the process set whose ``process_set_id`` is the given number.

    Raises:
        ConfigurationError: If no usable set has this number.
    """
    for entry in (global_process_set, *_added):
        if entry.process_set_id == process_set_id and entry._usable:
            return entry
    raise ConfigurationError(
        f"process_set_id {process_set_id} is unknown; call add_process_set first."
    )
