"""Assignment of GPUs to ranks, and configuration of TensorFlow's devices.

Which GPUs a process sees depends on the launcher. Under mpirun, each rank of a host sees all of the
host's GPUs. Under ``srun --gpus-per-task=1``, each rank sees one GPU, which always has number 0,
and ``CUDA_VISIBLE_DEVICES`` may be the same on all ranks. So ranks exchange the ids of GPUs, not
their numbers. Each rank computes the assignment for all ranks, so that every rank raises the same
error if a GPU is missing.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from hvdtrain.cluster.placement import available_cores
from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Settings
from hvdtrain.errors import LaunchError
from hvdtrain.private_api import tensorflow as private_tensorflow

__all__ = [
    "assign_gpus",
    "bind",
    "capabilities",
    "reserve_thread_for_buckets",
    "set_up",
    "tower_devices",
    "visible_gpus",
]

logger = logging.getLogger(__package__)

_INIT_FIRST = "Call hvdtrain.init() first, before creating any tensor, variable or model."


def visible_gpus(host: str, environ: Mapping[str, str]) -> list[str]:
    """Return the ids of the GPUs that this process sees, in TensorFlow's order.

    Ids are unique across hosts. If CUDA provides no ids, they consist of the host and a number. The
    number is taken from ``CUDA_VISIBLE_DEVICES`` or a similar variable, if one is set.
    """
    count = len(tf.config.list_physical_devices("GPU"))
    if count == 0:
        return []
    uuids = _cuda_uuids()
    if len(uuids) == count:
        return uuids
    numbers = [str(number) for number in range(count)]
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        entries = environ.get(name, "").split(",")
        if len(entries) == count and all(entries):
            numbers = entries
            break
    return [f"{host} GPU {number}" for number in numbers]


def assign_gpus(
    visible: Sequence[Sequence[str] | None], *, share: bool, each: int = 1
) -> list[tuple[int, ...]]:
    """Assign GPUs to all ranks.

    Args:
        visible: For each rank, the ids of the GPUs that it sees, or None if the rank needs no GPU.
        share: Whether ranks may share a GPU if there are too few.
        each: Number of GPUs per rank.

    Returns:
        For each rank, the indices of its GPUs in its list of visible GPUs. Empty if the rank sees
        no GPU. If all ranks of a host see the same GPUs and get one each, the index is the local
        rank.

    Raises:
        LaunchError: If a rank sees fewer than ``each`` GPUs, or if ``share`` is False and other
            ranks have taken too many of them.
    """
    owners: dict[str, list[int]] = collections.defaultdict(list)
    chosen: list[tuple[int, ...]] = []
    for rank, gpus in enumerate(visible):
        if gpus and len(gpus) < each:
            raise LaunchError(_too_few_gpus(rank, len(gpus), each))
        gpus = gpus or []
        indices = sorted(range(len(gpus)), key=lambda i: (len(owners[gpus[i]]), i))[:each]
        if any(owners[gpus[index]] for index in indices) and not share:
            raise LaunchError(_no_gpu_left(rank, gpus, owners, each))
        for index in indices:
            owners[gpus[index]].append(rank)
        chosen.append(tuple(sorted(indices)))
    return chosen


def capabilities() -> tuple[bool, bool]:
    """Return whether TensorFlow has NCCL, and whether its devices can still be connected.

    These are ``has_nccl`` and ``ready`` of ``DeviceCapabilities``.
    """
    with_gpus = tf.test.is_built_with_cuda() or tf.test.is_built_with_rocm()
    return with_gpus, private_tensorflow.is_connected() or not private_tensorflow.in_use()


def bind(
    topology: Topology, settings: Settings, visible: Sequence[Sequence[str] | None]
) -> list[str]:
    """Restrict TensorFlow to this rank's GPUs, and let their memory grow on demand.

    If there are several towers and no GPUs, each tower gets a logical CPU device.

    Args:
        topology: Rank and host of this process in the job.
        settings: Settings. Only ``share_gpus`` and ``towers`` are used.
        visible: For each rank, the result of ``visible_gpus``, or None if the rank needs no GPU.

    Returns:
        For each rank, the id of its first GPU, or "" without a GPU.

    Raises:
        LaunchError: If there are too few GPUs, or if TensorFlow already uses its devices.
    """
    chosen = assign_gpus(visible, share=settings.share_gpus, each=settings.towers)
    indices = chosen[topology.rank]
    if topology.is_chief:
        _report_missing(visible)
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
    return [ids[own[0]] if ids and own else "" for ids, own in zip(visible, chosen)]


def set_up(settings: Settings) -> None:
    """Set TensorFlow's device placement, and exclude hvdtrain from AutoGraph.

    Raises:
        LaunchError: If TensorFlow lacks private API that hvdtrain needs, or if
            ``log_device_placement`` is set and TensorFlow already uses its devices.
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
    """Let TensorFlow run a second operation while the allreduce of a bucket waits for other ranks.

    On one core, TensorFlow would otherwise use a single thread. If the program has configured
    threads, or already uses TensorFlow's devices, nothing changes.
    """
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    if configured or "TF_NUM_INTEROP_THREADS" in os.environ or private_tensorflow.in_use():
        return
    if available_cores() == 1:
        tf.config.threading.set_inter_op_parallelism_threads(2)


def tower_devices(count: int) -> list[str]:
    """Return the names of the devices of ``count`` towers.

    Raises:
        LaunchError: If the program has removed devices since ``bind``.
    """
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    if len(devices) < count:
        raise LaunchError(
            f"--devices-per-rank {count} needs {count} devices, but TensorFlow has {len(devices)}: "
            f"{', '.join(device.name for device in devices)}. Don't set visible or logical devices "
            "after hvdtrain.init()."
        )
    return [device.name for device in devices[:count]]


def _report_missing(visible: Sequence[Sequence[str] | None]) -> None:
    without = [rank for rank, gpus in enumerate(visible) if gpus is not None and not gpus]
    if not without:
        return
    if not any(visible):
        logger.info("no GPU found; computing on the CPU")
    else:
        ranks = ", ".join(map(str, without))
        logger.warning(
            f"{len(without)} of {len(visible)} ranks run without a GPU and slow down the others: "
            f"{ranks}"
        )


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


def _too_few_gpus(rank: int, gpus: int, each: int) -> str:
    return (
        f"Rank {rank} sees {gpus} GPU{'s' * (gpus > 1)}, but --mode towers --devices-per-rank "
        f"{each} needs {each}. Give it {each} GPUs, set HVDTRAIN_DEVICES_PER_RANK={gpus}, or use "
        "the CPU with CUDA_VISIBLE_DEVICES=-1."
    )


def _no_gpu_left(
    rank: int, gpus: Sequence[str], owners: Mapping[str, Sequence[int]], each: int
) -> str:
    taken = "; ".join(
        f"{gpu}: rank {', '.join(map(str, owners[gpu]))}" for gpu in gpus if owners.get(gpu)
    )
    problem, owned, remedy = "more ranks than GPUs", "all", "one rank per GPU"
    if each > 1:
        problem, owned = f"too few GPUs for --devices-per-rank {each}", "some"
        remedy = "fewer ranks, or reduce --devices-per-rank"
    return (
        f"There are {problem}: rank {rank} sees {len(gpus)} GPUs, and {owned} of them are in use "
        f"({taken}). Start {remedy}, let ranks share GPUs with HVDTRAIN_SHARE_GPUS=1 (hvdtrain run "
        "--share-gpus), or use the CPU with CUDA_VISIBLE_DEVICES=-1."
    )


def _cuda_uuids() -> list[str]:
    """Return the ids of CUDA's devices in CUDA's order.

    The list is empty without a working driver.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        # The second version of this function distinguishes the parts of a partitioned GPU (MIG).
        get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    except (OSError, AttributeError):
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    uuids: list[str] = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        uuid = (ctypes.c_ubyte * 16)()
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or get_uuid(uuid, device):
            return []
        uuids.append("GPU-" + bytes(uuid).hex())
    return uuids
