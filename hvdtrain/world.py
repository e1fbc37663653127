"""The state of this process in the job: who it is, its settings, and its way to the other ranks.

``init()`` sets it once; everything else in hvdtrain asks here.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from hvdtrain.cluster.roles import Roles
from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError, NotInitializedError
from hvdtrain.job_entry import World, enter_job
from hvdtrain.monitor.timeline import Timeline, file_of

if TYPE_CHECKING:
    from hvdtrain.tensorflow.device_collectives import DeviceCollectives

__all__ = [
    "collectives",
    "device_collectives",
    "hosts",
    "init",
    "is_chief",
    "is_initialized",
    "local_rank",
    "local_size",
    "node_rank",
    "rank",
    "roles",
    "settings",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "topology",
]


_lock = threading.RLock()
_world: World | None = None
_timeline: Timeline | None = None


def init() -> None:
    """Find out who this process is, reach the other ranks, and take this rank's GPU, or its GPUs.

    Call it at the start of the program, before anything uses TensorFlow's devices. Further calls
    do nothing. Where TensorFlow's global seed is not set yet, all ranks get the same one, so that
    unseeded shuffles of ``tf.data`` agree. Collective over all ranks.

    Raises:
        LaunchError: What the launcher, MPI and the GPUs say can't all be true.
        ConfigurationError: A variable ``HVDTRAIN_...`` holds what can't be used.
    """
    global _world
    with _lock:
        if _world is None:
            _world = enter_job()
            if _world.settings.timeline_filename is not None:
                start_timeline(_world.settings.timeline_filename)


def shutdown() -> None:
    """Leave the job's collectives; all ranks call it, or none. Without ``init()`` no effect.

    Not needed at the end of a program: a rank that ends well leaves by itself.
    """
    global _world
    with _lock:
        if _world is not None:
            stop_timeline()
            _world.collectives.close()
            _world = None


def is_initialized() -> bool:
    """Whether ``init()`` has been called, and ``shutdown()`` not since."""
    return _world is not None


def topology() -> Topology:
    """The place of this process in the job, with ``node_rank`` known."""
    return _entered().topology


def roles() -> Roles:
    """Return the roles of the ranks: which train, and which are parameter servers."""
    return _entered().roles


def settings() -> Settings:
    """The settings that ``init()`` found in the environment."""
    return _entered().settings


def collectives() -> Engine:
    """Operations between all ranks, on NumPy arrays."""
    return _entered().collectives


def device_collectives() -> DeviceCollectives | None:
    """Return what combines tensors of all ranks where they are; None where the engine does it."""
    return _entered().on_devices


def rank() -> int:
    """Number of this process among those that train, from 0; a lower one when some were lost.

    Parameter servers are counted after them.
    """
    world = _entered()
    rank = world.collectives.rank
    return [*world.roles.workers, *world.roles.servers].index(rank) if world.roles.servers else rank


def size() -> int:
    """Number of processes that train and are left; parameter servers don't count."""
    world = _entered()
    return len(world.roles.workers) if world.roles.servers else world.collectives.size


def local_rank() -> int:
    """Number of this process among those of the job on its host, from 0."""
    return _entered().topology.local_rank


def local_size() -> int:
    """Number of processes of the job on this host."""
    return _entered().topology.local_size


def node_rank() -> int:
    """Index of this host among the hosts of the job, from 0."""
    index = _entered().topology.node_rank
    assert index is not None, "init() fills it in"
    return index


def hosts() -> tuple[int, ...]:
    """The index of the host of each rank, from 0 in the order of the hosts' first ranks."""
    return _entered().hosts


def is_chief() -> bool:
    """Whether this is rank 0, the one that prints, logs and saves."""
    return _entered().collectives.rank == 0


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write from now on when this rank is in which operation between ranks; see docs/timeline.md.

    Args:
        file_path: Written anew by rank 0; by each rank that calls this where ``{rank}`` stands in
            it, for the rank's number.
        mark_cycles: Has no effect, as there are no cycles.

    Raises:
        ConfigurationError: A timeline is being written already.
    """
    global _timeline
    with _lock:
        collectives = _entered().collectives
        if _timeline is not None:
            raise ConfigurationError(
                "A timeline is being written already; call stop_timeline() before another "
                f"start_timeline({os.fspath(file_path)!r})."
            )
        file = file_of(os.fspath(file_path), collectives.rank)
        if file is not None:
            _timeline = Timeline(file, collectives.rank)
            collectives.observers.append(_timeline.note)


def stop_timeline() -> None:
    """Write no more of it. Without a timeline no effect."""
    global _timeline
    with _lock:
        if _timeline is not None:
            _entered().collectives.observers.remove(_timeline.note)
            _timeline.close()
            _timeline = None


def _entered() -> World:
    if _world is None:
        raise NotInitializedError(
            "hvdtrain doesn't know yet who this process is. Call hvdtrain.init() once, at the "
            "start of the program."
        )
    return _world
