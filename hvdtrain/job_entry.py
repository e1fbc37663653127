"""The entry of a process into its job: it finds its rank, reaches the others, and takes GPUs."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.backend import Choice, DeviceCapabilities, choose_backend, choose_for_devices
from hvdtrain.cluster.rank_process import claim_rank, find_rank_process
from hvdtrain.cluster.roles import Roles, assign_roles
from hvdtrain.cluster.topology import Topology, host_id, read_topology
from hvdtrain.collectives import Engine, create
from hvdtrain.config import LAUNCHER, Settings, check_in_common, read_settings
from hvdtrain.errors import ConfigurationError, LaunchError
from hvdtrain.log import LOGGER, show
from hvdtrain.monitor import report

if TYPE_CHECKING:
    from hvdtrain.tensorflow.device_collectives import DeviceCollectives

__all__ = ["World", "enter_job"]


@dataclass(frozen=True, kw_only=True)
class World:
    """The state of a process in its job; ``hvdtrain.world`` has a function for each field."""

    topology: Topology
    settings: Settings
    roles: Roles
    collectives: Engine
    on_devices: DeviceCollectives | None
    hosts: tuple[int, ...]


def enter_job() -> World:
    """Do what ``hvdtrain.init()`` says; collective over all ranks."""
    rank_process = find_rank_process(os.environ)
    topology = read_topology(os.environ) if rank_process is None else Topology()
    settings = read_settings(os.environ)
    if rank_process is not None:
        settings = dataclasses.replace(settings, mode="allreduce")  # no servers
    timed = settings.log_with_timestamp
    # hvdtrain run puts the rank before each line itself.
    tag = f"[{topology.rank}] " if timed and LAUNCHER not in os.environ else ""
    show(settings.log_level, tag=tag, with_time=timed)
    LOGGER.debug("%s", topology)
    if rank_process is not None:
        LOGGER.warning(
            "this process works alone and on the CPU: it is a child of process %d, which is the "
            "rank. Call hvdtrain.init() in that process alone",
            rank_process,
        )
    elif topology.size > 1:
        claim_rank(os.environ)
    roles = assign_roles(topology.size, settings)
    choice = choose_backend(topology, settings.backend, has_servers=settings.has_servers)
    with report.during("starting MPI"):
        collectives = _engine(choice, topology, settings)
    if topology.size > 1:
        from hvdtrain.collectives import exit_hooks

        # From here on a rank that fails ends the others too.
        exit_hooks.install(collectives, report.failed)
    report.phase("started")
    # Reached only when asked for: this imports TensorFlow.
    from hvdtrain.tensorflow import devices, random_seed

    devices.set_up(settings)
    serves = topology.rank in roles.servers
    without_gpu = serves or rank_process is not None
    gpus = None if without_gpu else devices.visible_gpus(socket.gethostname(), os.environ)
    common = settings.in_common
    mine = {
        "host": host_id(),
        "gpus": gpus,
        "capabilities": devices.capabilities(),
        "common": common,
    }
    everyone: list[dict[str, Any]] = collectives.allgather_object(mine, name="hvdtrain.init()")
    check_in_common([entry["common"] for entry in everyone])
    hosts = _host_indices([entry["host"] for entry in everyone])
    if topology.node_rank is None:
        topology = dataclasses.replace(topology, node_rank=hosts[topology.rank])
    owned = devices.bind(topology, settings, [entry["gpus"] for entry in everyone])
    capabilities = [
        DeviceCapabilities(gpu, *entry["capabilities"]) for gpu, entry in zip(owned, everyone)
    ]
    choice, on_devices = _on_devices(choice, settings, collectives, capabilities, hosts)
    if topology.size > 1:
        _check_compression(choice, settings)
        if collectives.bucket_bytes and on_devices is None:
            devices.compute_beside_buckets()
        if topology.is_chief:
            _report(choice, collectives, settings)
            if settings.compression != "none" and max(hosts) == 0:
                LOGGER.info("--compression does nothing here: there is one host")
        random_seed.set_unless_set(
            collectives.broadcast_object(secrets.randbits(31), name="seed of hvdtrain.init()")
        )
    return World(
        topology=topology,
        settings=settings,
        roles=roles,
        collectives=collectives,
        on_devices=on_devices,
        hosts=hosts,
    )


def _engine(choice: Choice, topology: Topology, settings: Settings) -> Engine:
    if choice.backend == "mpi" or topology.size == 1:
        return create(topology, settings)
    # Imports TensorFlow, and Horovod.
    from hvdtrain.collectives.engine import Engine
    from hvdtrain.tensorflow.horovod_transport import HorovodTransport

    return Engine(HorovodTransport(settings.timeout_s))


def _on_devices(
    choice: Choice,
    settings: Settings,
    collectives: Engine,
    capabilities: Sequence[DeviceCapabilities],
    hosts: Sequence[int],
) -> tuple[Choice, DeviceCollectives | None]:
    """Settle the backend, and connect the devices; None where these don't combine gradients."""
    if collectives.size == 1 or choice.backend != "mpi":
        return choice, None
    choice = choose_for_devices(
        settings.backend,
        capabilities,
        has_servers=settings.has_servers,
        elastic=collectives.survives_losses,
    )
    if choice.backend != "nccl":
        return choice, None
    # Imports TensorFlow.
    from hvdtrain.tensorflow import device_collectives

    on_gpus = bool(capabilities[collectives.rank].gpu)
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


def _report(choice: Choice, collectives: Engine, settings: Settings) -> None:
    who = {"mpi": "MPI", "nccl": "NCCL", "horovod": "an installed Horovod"}[choice.backend]
    LOGGER.info("%s combines gradients: %s", who, choice.reason)
    LOGGER.debug("collectives: %s between %d ranks", collectives.kind, collectives.size)
    LOGGER.debug("%s", settings)


def _host_indices(hosts: Sequence[str]) -> tuple[int, ...]:
    """Hosts are counted in the order of their first ranks."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)
