"""Binding of ranks to GPUs, and configuration of TensorFlow's devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

import tensorflow as tf

from hvdtrain.cluster.gpu_assignment import RankGpus, assign_gpus, first_gpus
from hvdtrain.cluster.gpu_search import log_gpus, search_gpus
from hvdtrain.cluster.gpus import Gpu
from hvdtrain.cluster.placement import available_cores
from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.errors import LaunchError
from hvdtrain.frameworks.tensorflow import device_connection, random_seed
from hvdtrain.private_api import tensorflow as private_tensorflow

__all__ = [
    "bind",
    "capabilities",
    "find_gpus",
    "reserve_thread_for_buckets",
    "set_seed_unless_set",
    "set_up",
    "tower_devices",
]

_INIT_FIRST = "Call hvdtrain.init() first, before creating any tensor, variable or model."


def find_gpus(
    topology: Topology, environ: MutableMapping[str, str], *, needed: bool = True
) -> RankGpus:
    """Return the GPUs that TensorFlow sees, as ``search_gpus`` describes."""
    return search_gpus(
        topology.local_rank,
        environ,
        count=lambda: len(tf.config.list_physical_devices("GPU")),
        obstacle=_obstacle,
        needed=needed,
    )


def _obstacle() -> str:
    if not tf.test.is_built_with_cuda():
        return (
            "TensorFlow is built without CUDA: install hvdtrain[gpu], or set "
            "CUDA_VISIBLE_DEVICES=-1 to compute on the CPU"
        )
    return "TensorFlow can't use them: TF_CPP_MIN_LOG_LEVEL=0 shows why"


def capabilities(environ: Mapping[str, str], *, several_hosts: bool) -> tuple[bool, str, int]:
    """Return, as ``DeviceCapabilities``, how TensorFlow can combine gradients on devices."""
    return device_connection.capabilities(environ, several_hosts=several_hosts)


def bind(topology: Topology, settings: Settings, ranks: Sequence[RankGpus]) -> list[Gpu | None]:
    """Restrict TensorFlow to this rank's GPUs, and let their memory grow on demand.

    With ``--mode towers`` and no GPUs, each tower gets a logical CPU device. The chief logs a
    warning about ranks without GPUs, and about GPUs that are faulty, in use or of different models.

    ``ranks`` contains the result of ``find_gpus`` of each rank.

    Returns:
        A list with the first GPU of each rank, or None for a rank without GPUs.

    Raises:
        LaunchError: If there are too few GPUs, or if TensorFlow already uses its devices.
    """
    visible = [one.visible for one in ranks]
    chosen = assign_gpus(visible, share=settings.share_gpus, each=settings.towers)
    indices = chosen[topology.rank]
    if topology.is_chief:
        log_gpus(ranks, chosen)
    if visible[topology.rank] is None:
        tf.config.set_visible_devices([], "GPU")
    physical = tf.config.list_physical_devices("GPU")
    gpus = [physical[index] for index in indices]
    try:
        if gpus:
            _use_gpus(gpus)
        elif settings.towers > 1:
            _divide_cpu(settings.towers)
    except RuntimeError as error:
        what = f"GPU {', '.join(map(str, indices))}" if gpus else f"{settings.towers} CPU devices"
        raise LaunchError(
            f"Rank {topology.rank} can't use {what}, because the program has already used "
            f"TensorFlow's devices ({error}). {_INIT_FIRST}"
        ) from None
    return first_gpus(ranks, chosen)


def set_up(settings: Settings, collectives: Engine) -> None:
    """Set TensorFlow's device placement, and exclude hvdtrain from AutoGraph.

    Raises:
        LaunchError: If TensorFlow lacks private API that hvdtrain needs. Also if
            ``log_device_placement`` is set, and TensorFlow already uses its devices.
    """
    private_tensorflow.check()
    # No control flow in hvdtrain depends on tensors.
    private_tensorflow.exclude_from_autograph("hvdtrain")
    tf.config.set_soft_device_placement(settings.soft_placement)
    if not settings.log_device_placement:
        return
    # TensorFlow would log nothing, without an error.
    if private_tensorflow.in_use():
        raise LaunchError(
            "--log-device-placement has no effect, because the program has already used "
            f"TensorFlow's devices. {_INIT_FIRST}"
        )
    tf.debugging.set_log_device_placement(True)


def reserve_thread_for_buckets() -> None:
    """Let TensorFlow run other operations while an allreduce waits for other ranks.

    By default, TensorFlow has a single thread on a host with one core. This function requests two.
    If the program has configured threads, or if TensorFlow already uses its devices, nothing
    changes.
    """
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    if configured or "TF_NUM_INTEROP_THREADS" in os.environ or private_tensorflow.in_use():
        return
    if available_cores() == 1:
        tf.config.threading.set_inter_op_parallelism_threads(2)


def set_seed_unless_set(seed: int) -> None:
    """Set TensorFlow's global seed unless the program has set it."""
    random_seed.set_unless_set(seed)


def tower_devices(count: int) -> list[str]:
    """Return the names of the devices of ``count`` towers.

    Raises:
        LaunchError: If the program has removed devices after ``bind``.
    """
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    if len(devices) < count:
        raise LaunchError(
            f"--devices-per-rank {count} needs {count} devices, but TensorFlow has {len(devices)}: "
            f"{', '.join(device.name for device in devices)}. Don't set visible or logical devices "
            "after hvdtrain.init()."
        )
    return [device.name for device in devices[:count]]


def _use_gpus(gpus: Sequence[tf.config.PhysicalDevice]) -> None:
    if tf.config.get_visible_devices("GPU") != gpus:
        tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        if not tf.config.experimental.get_memory_growth(gpu):
            tf.config.experimental.set_memory_growth(gpu, True)


def _divide_cpu(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) != count:
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        tf.config.set_logical_device_configuration(cpu, parts)
