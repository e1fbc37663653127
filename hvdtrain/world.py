"""The state of this process in the job: who it is, its settings, and its way to the other ranks.

``init()`` sets it once; everything else in hvdtrain asks here.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.backend import Choice, DeviceCapabilities, choose_backend, choose_for_devices
from hvdtrain.cluster.roles import Roles, assign_roles
from hvdtrain.cluster.topology import Topology, host_id, read_topology
from hvdtrain.collectives import Collectives, create
from hvdtrain.config import LAUNCHER, Settings, read_settings
from hvdtrain.config.agreement import check_in_common
from hvdtrain.errors import ConfigurationError, LaunchError, NotInitializedError
from hvdtrain.log import LOGGER, show
from hvdtrain.monitor import report
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


@dataclass(frozen=True, kw_only=True)
class _World:
    topology: Topology
    settings: Settings
    roles: Roles
    collectives: Collectives
    on_devices: DeviceCollectives | None
    hosts: tuple[int, ...]


_lock = threading.RLock()
_world: _World | None = None
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
            _world = _enter()
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
    """Which ranks train, and which are parameter servers."""
    return _entered().roles


def settings() -> Settings:
    """The settings that ``init()`` found in the environment."""
    return _entered().settings


def collectives() -> Collectives:
    """Operations between all ranks, on NumPy arrays."""
    return _entered().collectives


def device_collectives() -> DeviceCollectives | None:
    """What combines tensors of all ranks where they are, without the engine; None where it does."""
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


def _entered() -> _World:
    if _world is None:
        raise NotInitializedError(
            "hvdtrain doesn't know yet who this process is. Call hvdtrain.init() once, at the "
            "start of the program."
        )
    return _world


def _enter() -> _World:
    topology = read_topology(os.environ)
    settings = read_settings(os.environ)
    timed = settings.log_with_timestamp
    # hvdtrain run puts the rank before each line itself.
    tag = f"[{topology.rank}] " if timed and LAUNCHER not in os.environ else ""
    show(settings.log_level, tag=tag, with_time=timed)
    LOGGER.debug("%s", topology)
    roles = assign_roles(topology.size, settings)
    choice = choose_backend(topology, settings.backend, has_servers=settings.has_servers)
    collectives = _engine(choice, topology, settings)
    if topology.size > 1:
        from hvdtrain.collectives import exit_hooks

        # From here on a rank that fails ends the others too.
        exit_hooks.install(collectives, report.failed)
    report.phase("started")
    # Reached only when asked for: this imports TensorFlow.
    from hvdtrain.tensorflow import devices, random_seed

    devices.set_placement(settings)
    serves = topology.rank in roles.servers
    gpus = None if serves else devices.visible_gpus(socket.gethostname(), os.environ)
    common = settings.in_common
    mine = {"host": host_id(), "gpus": gpus, "means": devices.means(), "common": common}
    everyone: list[dict[str, Any]] = collectives.allgather_object(mine, name="hvdtrain.init()")
    check_in_common([entry["common"] for entry in everyone])
    hosts = _host_indices([entry["host"] for entry in everyone])
    if topology.node_rank is None:
        topology = dataclasses.replace(topology, node_rank=hosts[topology.rank])
    owned = devices.bind(topology, settings, [entry["gpus"] for entry in everyone])
    means = [DeviceCapabilities(gpu, *entry["means"]) for gpu, entry in zip(owned, everyone)]
    choice, on_devices = _on_devices(choice, settings, collectives, means, hosts)
    if topology.size > 1:
        _check_compression(choice, settings)
        if topology.is_chief:
            _report(choice, collectives, settings)
            if settings.compression != "none" and max(hosts) == 0:
                LOGGER.info("--compression does nothing here: there is one host")
        random_seed.set_unless_set(
            collectives.broadcast_object(secrets.randbits(31), name="seed of hvdtrain.init()")
        )
    return _World(
        topology=topology,
        settings=settings,
        roles=roles,
        collectives=collectives,
        on_devices=on_devices,
        hosts=hosts,
    )


def _engine(choice: Choice, topology: Topology, settings: Settings) -> Collectives:
    if choice.backend == "mpi" or topology.size == 1:
        return create(topology, settings)
    # Imports TensorFlow, and Horovod.
    from hvdtrain.collectives.engine import Engine
    from hvdtrain.tensorflow.horovod_transport import HorovodTransport

    return Engine(HorovodTransport(settings.timeout_s))


def _on_devices(
    choice: Choice,
    settings: Settings,
    collectives: Collectives,
    means: Sequence[DeviceCapabilities],
    hosts: Sequence[int],
) -> tuple[Choice, DeviceCollectives | None]:
    """What combines gradients in the end, and what does it where they are, if anything does."""
    if collectives.size == 1 or choice.backend != "mpi":
        return choice, None
    choice = choose_for_devices(
        settings.backend,
        means,
        has_servers=settings.has_servers,
        elastic=collectives.survives_losses,
    )
    if choice.backend != "nccl":
        return choice, None
    # Imports TensorFlow.
    from hvdtrain.tensorflow import device_collectives

    on_gpus = bool(means[collectives.rank].gpu)
    try:
        return choice, device_collectives.connect(collectives, on_gpus=on_gpus, hosts=hosts)
    except LaunchError as error:
        if settings.backend == "nccl":
            raise
        return Choice("mpi", str(error)), None


def _check_compression(choice: Choice, settings: Settings) -> None:
    if settings.compression != "none" and choice.backend != "mpi":
        raise ConfigurationError(
            f"--compression {settings.compression} is for gradients that cross between hosts over "
            f"MPI, and here {choice.backend} combines them: {choice.reason}. Leave it out, or give "
            "--backend mpi."
        )


def _report(choice: Choice, collectives: Collectives, settings: Settings) -> None:
    who = {"mpi": "MPI", "nccl": "NCCL", "horovod": "an installed Horovod"}[choice.backend]
    LOGGER.info("%s combines gradients: %s", who, choice.reason)
    LOGGER.debug("collectives: %s between %d ranks", collectives.kind, collectives.size)
    LOGGER.debug("%s", settings)


def _host_indices(hosts: Sequence[str]) -> tuple[int, ...]:
    """Hosts are counted in the order of their first ranks."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)
