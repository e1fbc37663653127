"""Enters a job: finds this process's rank, connects to the other ranks, and binds its GPUs."""

from __future__ import annotations

import dataclasses
import importlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.cluster.engine_choice import (
    DeviceCapabilities,
    EngineChoice,
    choose_device_engine,
    choose_engine,
    without_nccl,
)
from hvdtrain.cluster.gpu_assignment import RankGpus
from hvdtrain.cluster.rank_process import claim_rank, find_rank_process
from hvdtrain.cluster.roles import Roles, assign_roles
from hvdtrain.cluster.topology import Topology, host_id, read_topology
from hvdtrain.collectives import Engine, create
from hvdtrain.collectives.tuning import GPU_BUCKET_BYTES
from hvdtrain.config import LAUNCHER, Settings, check_common_variables, read_settings
from hvdtrain.errors import ConfigurationError, LaunchError
from hvdtrain.log import LOGGER, configure_log
from hvdtrain.monitor import report

if TYPE_CHECKING:
    from hvdtrain.cluster.gpus import Gpu
    from hvdtrain.frameworks.tensorflow.device_collectives import DeviceCollectives

__all__ = ["ARGUMENT", "Framework", "World", "enter_job"]

Framework = Literal["tensorflow", "torch", "jax"]

ARGUMENT = "argument of hvdtrain.init()"
"""What selects the framework if the program passes its name to ``init``."""

# The name of each framework in messages, its Python package, and how to install it.
_FRAMEWORKS = {
    "tensorflow": ("TensorFlow", "tensorflow", '"hvdtrain[cpu]" (or "hvdtrain[gpu]")'),
    "torch": ("PyTorch", "torch", '"hvdtrain[torch]"'),
    "jax": ("JAX", "jax", '"hvdtrain[jax]"'),
}


@dataclass(frozen=True, kw_only=True)
class World:
    """The state of a process in its job. ``hvdtrain.world`` has a function for each field."""

    topology: Topology
    settings: Settings
    roles: Roles
    collectives: Engine
    device_collectives: DeviceCollectives | None
    hosts: tuple[int, ...]
    framework: str


def enter_job(framework: str = "tensorflow", source: str = ARGUMENT) -> World:
    """Enter the job, as ``hvdtrain.init()`` describes. All ranks must call this.

    Args:
        framework: The framework in which the program computes. No other framework is imported.
        source: What selects the framework, for error messages.
    """
    if framework not in _FRAMEWORKS:
        raise ConfigurationError(
            f"hvdtrain can't train with the framework {framework!r} ({source}); "
            f"{_other(source, 'one of ' + ', '.join(_FRAMEWORKS))}."
        )
    rank_process = find_rank_process(os.environ)
    topology = read_topology(os.environ) if rank_process is None else Topology()
    settings = read_settings(os.environ)
    if rank_process is not None:
        settings = dataclasses.replace(settings, mode="allreduce")  # no parameter servers
    timed = settings.log_with_timestamp
    # hvdtrain run puts the rank before each line itself.
    tag = f"[{topology.rank}] " if timed and LAUNCHER not in os.environ else ""
    configure_log(settings.log_level, tag=tag, with_time=timed, is_chief=topology.is_chief)
    LOGGER.debug("%s", topology)
    if rank_process is not None:
        LOGGER.warning(
            "this process works alone and on the CPU, because it is a child of process %d, which "
            "is the rank; call hvdtrain.init() only in that process",
            rank_process,
        )
    elif topology.size > 1:
        claim_rank(os.environ)
    roles = assign_roles(topology.size, settings)
    choice = choose_engine(topology, settings.backend, has_servers=settings.has_servers)
    _check_framework(framework, settings, choice)
    with report.during("starting MPI"):
        collectives = _create_engine(choice, topology, settings)
    if topology.size > 1:
        from hvdtrain.collectives import exit_hooks

        # From now on, the failure of one rank ends the other ranks too.
        exit_hooks.install(collectives, report.failed)
    report.phase("started")
    uses_gpus = topology.rank not in roles.servers and rank_process is None
    _check_same_framework(collectives.allgather_object(framework, name="frameworks"))
    devices = _import_devices(framework, source)
    return _set_up_devices(
        framework, devices, choice, topology, settings, roles, collectives, uses_gpus=uses_gpus
    )


def _other(source: str, name: str) -> str:
    """Return how to choose another framework than the one that ``source`` selects."""
    if source == ARGUMENT:
        return f"pass {name} to hvdtrain.init()"
    return f"set KERAS_BACKEND to {name}"


def _check_framework(framework: str, settings: Settings, choice: EngineChoice) -> None:
    """Check that the settings support the framework."""
    if framework == "tensorflow":
        return
    uses = f"the program uses {_FRAMEWORKS[framework][0]}"
    if settings.mode != "allreduce":
        raise ConfigurationError(
            f"--mode {settings.mode} needs Keras on TensorFlow, but {uses}; omit it, or set "
            "KERAS_BACKEND=tensorflow."
        )
    if settings.backend == "nccl":
        raise ConfigurationError(
            f"--backend nccl (HVDTRAIN_BACKEND) needs TensorFlow, but {uses}, and gradients are "
            "combined in host memory; omit it."
        )
    if choice.engine == "horovod":
        raise ConfigurationError(
            f"Horovod combines gradients ({choice.reason}), which needs TensorFlow, but {uses}; "
            "start with hvdtrain run, mpirun or srun, and omit --backend."
        )


def _check_same_framework(frameworks: Sequence[str]) -> None:
    """Check that all ranks use the same framework."""
    for rank, framework in enumerate(frameworks):
        if framework != frameworks[0]:
            raise ConfigurationError(
                f"All ranks must use the same framework, got {_FRAMEWORKS[frameworks[0]][0]} on "
                f"rank 0 and {_FRAMEWORKS[framework][0]} on rank {rank}; set the same "
                "KERAS_BACKEND on all ranks, and compare ~/.keras/keras.json on their hosts."
            )


def _import_devices(framework: str, source: str) -> Any:
    """Import the module that finds and binds the devices of a framework."""
    title, package, extra = _FRAMEWORKS[framework]
    try:
        return importlib.import_module(f"hvdtrain.frameworks.{framework}.devices")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise LaunchError(
            f"The framework of this program is {framework} ({source}), but {title} is not "
            f"installed; install it: python -m pip install {extra}, or "
            f"{_other(source, 'another framework')}."
        ) from None


def _set_up_devices(
    framework: str,
    devices: Any,
    choice: EngineChoice,
    topology: Topology,
    settings: Settings,
    roles: Roles,
    collectives: Engine,
    *,
    uses_gpus: bool,
) -> World:
    """Exchange hosts and GPUs with the other ranks, and bind this rank's GPUs."""
    devices.set_up(settings, collectives)
    own: dict[str, Any] = {
        "host": host_id(),
        "gpus": dataclasses.asdict(devices.find_gpus(topology, os.environ, needed=uses_gpus)),
        "capabilities": devices.capabilities(
            os.environ, several_hosts=topology.local_size < topology.size
        ),
        "common": settings.common_variables,
    }
    everyone: list[dict[str, Any]] = collectives.allgather_object(own, name="hvdtrain.init()")
    check_common_variables([entry["common"] for entry in everyone])
    hosts = _host_indices([entry["host"] for entry in everyone])
    if topology.node_rank is None:
        topology = dataclasses.replace(topology, node_rank=hosts[topology.rank])
    ranks = [RankGpus.from_json(entry["gpus"]) for entry in everyone]
    gpus = devices.bind(topology, settings, ranks)
    if own_gpu := gpus[topology.rank]:
        report.bound(own_gpu.id)
    capabilities = [
        DeviceCapabilities(host, gpu, *entry["capabilities"])
        for host, gpu, entry in zip(hosts, gpus, everyone)
        if entry["capabilities"]
    ]
    _prepare_buckets(devices, choice, settings, collectives, gpus)
    choice, device_collectives = _connect_devices(choice, settings, collectives, capabilities)
    if topology.size > 1:
        _check_compression(choice, settings.compression, on_gpus=any(gpus))
        if topology.is_chief:
            _log_choice(choice, collectives, settings)
            if settings.compression != "none" and max(hosts) == 0 and device_collectives is None:
                LOGGER.info("--compression has no effect: all ranks are on one host")
        devices.set_seed_unless_set(
            collectives.broadcast_object(secrets.randbits(31), name="seed of hvdtrain.init()")
        )
    return World(
        topology=topology,
        settings=settings,
        roles=roles,
        collectives=collectives,
        device_collectives=device_collectives,
        hosts=hosts,
        framework=framework,
    )


def _prepare_buckets(
    devices: Any,
    choice: EngineChoice,
    settings: Settings,
    collectives: Engine,
    gpus: Sequence[Gpu | None],
) -> None:
    """Choose the size of the buckets, and let their reductions overlap with computation."""
    if all(gpus) and choice.engine == "mpi" and settings.bucket_bytes is None:
        collectives.bucket_bytes = collectives.bucket_bytes or GPU_BUCKET_BYTES
    on_devices = settings.backend == "nccl" or any(gpus)
    if collectives.size > 1 and (collectives.bucket_bytes or on_devices):
        # Before devices are connected, because this initializes TensorFlow's threads.
        devices.reserve_thread_for_buckets()


def _create_engine(choice: EngineChoice, topology: Topology, settings: Settings) -> Engine:
    if choice.engine == "mpi" or topology.size == 1:
        return create(topology, settings)
    # Imports TensorFlow and Horovod.
    from hvdtrain.frameworks.tensorflow.horovod_transport import HorovodTransport

    return Engine(HorovodTransport(settings.timeout_s))


def _connect_devices(
    choice: EngineChoice,
    settings: Settings,
    collectives: Engine,
    capabilities: Sequence[DeviceCapabilities],
) -> tuple[EngineChoice, DeviceCollectives | None]:
    """Choose the library for gradients, and connect the devices if it is NCCL."""
    if collectives.size == 1 or choice.engine != "mpi" or not capabilities:
        return choice, None
    choice = choose_device_engine(
        settings.backend,
        capabilities,
        has_servers=settings.has_servers,
        elastic=collectives.survives_losses,
    )
    if choice.engine != "nccl":
        return choice, None
    # Imports TensorFlow.
    from hvdtrain.frameworks.tensorflow.device_connection import connect

    try:
        return choice, connect(
            collectives,
            on_gpus=bool(capabilities[collectives.rank].gpu),
            hosts=[one.host for one in capabilities],
            bucket_bytes=settings.bucket_bytes,
        )
    except LaunchError as error:
        return without_nccl(settings.backend, str(error), failed=True), None


def _check_compression(choice: EngineChoice, compression: str, *, on_gpus: bool) -> None:
    """Check that the library that combines gradients supports ``--compression``."""
    if compression == "none" or choice.engine == "mpi":
        return
    forms: Sequence[str] = ()
    if choice.engine == "nccl":
        # TensorFlow's NCCL operations don't support bfloat16.
        forms = ("fp16",) if on_gpus else ("fp16", "bf16")
    if compression not in forms:
        raise ConfigurationError(
            f"--compression {compression} needs MPI, but {choice.engine} combines gradients: "
            f"{choice.reason}. {f'Use {forms[-1]}' if forms else 'Omit it'}, or pass --backend mpi."
        )


def _log_choice(choice: EngineChoice, collectives: Engine, settings: Settings) -> None:
    library = {"mpi": "MPI", "nccl": "NCCL", "horovod": "an installed Horovod"}[choice.engine]
    if choice.is_fallback:
        LOGGER.warning("MPI combines gradients, because NCCL failed: %s", choice.reason)
    else:
        LOGGER.info("%s combines gradients: %s", library, choice.reason)
    LOGGER.debug("collectives: %s between %d ranks", collectives.kind, collectives.size)
    LOGGER.debug("%s", settings)


def _host_indices(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the index of each rank's host. Hosts are in the order of their lowest ranks."""
    indices = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    return tuple(indices[host] for host in hosts)
