"""The state of this process in its job, which ``init()`` sets once."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from hvdtrain.cluster.roles import Roles
from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.config.keras_backend import find_backend
from hvdtrain.errors import ConfigurationError, NotInitializedError
from hvdtrain.job_entry import ARGUMENT, Framework, World, enter_job
from hvdtrain.monitor.timeline import Timeline, timeline_file

if TYPE_CHECKING:
    from hvdtrain.frameworks.tensorflow.device_collectives import DeviceCollectives

__all__ = [
    "collectives",
    "device_collectives",
    "framework",
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


def init(framework: Framework | None = None) -> None:
    """Enter the job: find this process's rank, connect to the other ranks, and bind its GPUs.

    Call ``init`` at the start of the program, before anything uses the framework's devices. Further
    calls have no effect. All ranks must call ``init``.

    If TensorFlow's global seed is not set, ``init`` sets the same seed on all ranks. Therefore
    ``shuffle`` of ``tf.data`` gives the same order on all ranks, even if you pass it no seed.

    Args:
        framework: ``"tensorflow"``, ``"torch"`` or ``"jax"``: the framework in which the program
            computes, and whose devices are bound. Defaults to the backend of Keras, whether Keras
            is imported already or not. It defaults to ``"torch"`` if the program has imported
            ``hvdtrain.torch``, and neither Keras nor TensorFlow.

    Raises:
        LaunchError: If the launcher, MPI and GPUs contradict each other.
        ConfigurationError: If an environment variable ``HVDTRAIN_...`` is invalid.
    """
    global _world
    with _lock:
        if _world is None:
            name, source = (framework, ARGUMENT) if framework else _find_framework()
            _world = enter_job(name, source)
            if _world.settings.timeline_filename is not None:
                start_timeline(_world.settings.timeline_filename)


def _find_framework() -> tuple[str, str]:
    """Return the framework in which the program probably computes, and what selects it."""
    modules = sys.modules
    if "keras" in modules:
        return str(modules["keras"].backend.backend()), "the backend of Keras"
    if (name := f"{__package__}.torch") in modules and "tensorflow" not in modules:
        return "torch", f"import of {name}"
    return find_backend(os.environ)


def shutdown() -> None:
    """Leave the job. Does nothing if ``init()`` was not called.

    Programs need not call ``shutdown`` before they end. If one rank calls it, all ranks must call
    it.
    """
    global _world
    with _lock:
        if _world is not None:
            stop_timeline()
            if _world.device_collectives is not None:
                _world.device_collectives.close()
            _world.collectives.close()
            _world = None


def is_initialized() -> bool:
    """Return whether this process is in a job: after ``init()`` and before ``shutdown()``."""
    return _world is not None


def topology() -> Topology:
    """Return the place of this process in the job, with its ``node_rank``."""
    return _entered().topology


def roles() -> Roles:
    """Return the ranks of workers and parameter servers."""
    return _entered().roles


def settings() -> Settings:
    """Return the settings that ``init()`` read from the environment."""
    return _entered().settings


def collectives() -> Engine:
    """Return the collectives on NumPy arrays between all ranks."""
    return _entered().collectives


def framework() -> str:
    """Return the framework for which ``init()`` bound devices: the name of a Keras backend."""
    return _entered().framework


def device_collectives() -> DeviceCollectives | None:
    """Return the collectives on device tensors; None if ``collectives()`` is used instead."""
    return _entered().device_collectives


def rank() -> int:
    """Return the rank of this process, from 0.

    The rank decreases when lower ranks are lost. Parameter servers are numbered after the ranks
    that train.
    """
    world = _entered()
    rank = world.collectives.rank
    return [*world.roles.workers, *world.roles.servers].index(rank) if world.roles.servers else rank


def size() -> int:
    """Return the number of ranks that train, without lost ranks and parameter servers."""
    world = _entered()
    return len(world.roles.workers) if world.roles.servers else world.collectives.size


def local_rank() -> int:
    """Return the index of this process among the job's processes on its host."""
    return _entered().topology.local_rank


def local_size() -> int:
    """Return the number of the job's processes on this host."""
    return _entered().topology.local_size


def node_rank() -> int:
    """Return the index of this host among the job's hosts."""
    index = _entered().topology.node_rank
    assert index is not None, "init() sets it"
    return index


def hosts() -> tuple[int, ...]:
    """Return the index of each rank's host. Hosts are in the order of their lowest ranks."""
    return _entered().hosts


def is_chief() -> bool:
    """Return whether this is rank 0, which prints, logs and saves for all ranks."""
    return _entered().collectives.rank == 0


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start to record this rank's collectives in a trace file (see docs/timeline.md).

    Args:
        file_path: The file, which is overwritten. Only rank 0 writes it. But if the path contains
            ``{rank}``, each rank that calls this writes its own file, whose path has the rank
            instead of ``{rank}``.
        mark_cycles: Ignored, because cycles are specific to Horovod.

    Raises:
        ConfigurationError: If a timeline is already being written.
    """
    global _timeline
    with _lock:
        collectives = _entered().collectives
        if _timeline is not None:
            raise ConfigurationError(
                "A timeline is already being written; call stop_timeline() before "
                f"start_timeline({os.fspath(file_path)!r})."
            )
        file = timeline_file(os.fspath(file_path), collectives.rank)
        if file is not None:
            _timeline = Timeline(file, collectives.rank)
            collectives.observers.append(_timeline.note)


def stop_timeline() -> None:
    """Finish the timeline, if one is being written."""
    global _timeline
    with _lock:
        if _timeline is not None:
            _entered().collectives.observers.remove(_timeline.note)
            _timeline.close()
            _timeline = None


def _entered() -> World:
    if _world is None:
        raise NotInitializedError(
            "hvdtrain is not initialized; call hvdtrain.init() once, at the start of the program."
        )
    return _world
