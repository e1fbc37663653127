"""The GPUs that each process owns, one or more, and the devices that TensorFlow computes on.

Launchers disagree about what a process sees. Under mpirun every rank of a host sees all GPUs;
under ``srun --gpus-per-task=1`` each sees one of its own, which all of them call number 0, and
``CUDA_VISIBLE_DEVICES`` may read the same on all. So ranks don't compare numbers: they tell each
other the GPUs' own ids, and share them out by those. Everyone decides for everyone, so that a
rank left without a GPU is the same error on every rank.

The number of threads is not set here, but where TensorFlow would have a single one: it takes it
from the cores that the launcher bound the rank to, or from ``TF_NUM_INTRAOP_THREADS``, which
``hvdtrain run`` sets.
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
    "compute_beside_buckets",
    "set_up",
    "tower_devices",
    "visible_gpus",
]

logger = logging.getLogger(__package__)


def visible_gpus(host: str, environ: Mapping[str, str]) -> list[str]:
    """Ids of the GPUs that this process sees, in TensorFlow's order.

    Two processes see the same id only if they see the same GPU. Where the driver tells no ids
    (only CUDA's does), host and number stand in for them; the number is the one in the variable
    that hides GPUs, if there is one.
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
    """Give every rank GPUs of those it sees.

    Args:
        visible: For each rank the ids of the GPUs that it sees; None for one that needs none.
        share: Whether ranks may share a GPU when there are not enough.
        each: How many GPUs a rank gets.

    Returns:
        For each rank the indices of its GPUs in its own list; empty where it gets none. Where all
        ranks of a host see the same GPUs and get one each, that is the local rank.

    Raises:
        LaunchError: A rank sees fewer GPUs than it gets, or too few that other ranks don't own
            and ``share`` is off.
    """
    owners: dict[str, list[int]] = collections.defaultdict(list)
    chosen: list[tuple[int, ...]] = []
    for rank, gpus in enumerate(visible):
        if not gpus:
            chosen.append(())
            continue
        if len(gpus) < each:
            raise LaunchError(_too_few_gpus(rank, len(gpus), each))
        indices = sorted(range(len(gpus)), key=lambda i: (len(owners[gpus[i]]), i))[:each]
        if any(owners[gpus[index]] for index in indices) and not share:
            raise LaunchError(_no_gpu_left(rank, gpus, owners, each))
        for index in indices:
            owners[gpus[index]].append(rank)
        chosen.append(tuple(sorted(indices)))
    return chosen


def capabilities() -> tuple[bool, bool]:
    """Return ``has_nccl`` and ``ready`` of ``DeviceCapabilities``, before devices are used."""
    with_gpus = tf.test.is_built_with_cuda() or tf.test.is_built_with_rocm()
    return with_gpus, private_tensorflow.is_connected() or not private_tensorflow.in_use()


def bind(
    topology: Topology, settings: Settings, visible: Sequence[Sequence[str] | None]
) -> list[str]:
    """Make this rank's GPUs the only ones that TensorFlow uses; memory is taken as it is needed.

    Towers without GPUs get as many logical CPU devices.

    Args:
        topology: Who this process is.
        settings: ``share_gpus`` and the number of towers count here.
        visible: What ``visible_gpus`` returned on each rank; None for one that needs no GPU.

    Returns:
        For each rank the id of the first GPU that it owns; empty where it has none.

    Raises:
        LaunchError: There are too few GPUs for the ranks, or TensorFlow uses its devices already.
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
            f"{what} can't be given to rank {topology.rank}, because this program has used "
            f"TensorFlow's devices already ({error}). Call hvdtrain.init() first, before any "
            "tensor, variable or model is made."
        ) from None
    return [gpus[mine[0]] if gpus and mine else "" for gpus, mine in zip(visible, chosen)]


def set_up(settings: Settings) -> None:
    """Tell TensorFlow how to take hvdtrain's code, and devices: as a wish or an order, and printed.

    Raises:
        LaunchError: TensorFlow uses its devices already, and can't be told to print them; or it
            lacks what hvdtrain needs of it.
    """
    private_tensorflow.check()
    # No code of hvdtrain's branches or loops over the values of tensors.
    private_tensorflow.convert_nothing_of("hvdtrain")
    tf.config.set_soft_device_placement(settings.soft_placement)
    if not settings.log_device_placement:
        return
    # TensorFlow itself would print nothing then, and not say so.
    if private_tensorflow.in_use():
        raise LaunchError(
            "The placement on devices can't be printed (--log-device-placement), because this "
            "program has used TensorFlow's devices already. Call hvdtrain.init() first, before any "
            "tensor, variable or model is made."
        )
    tf.debugging.set_log_device_placement(True)


def compute_beside_buckets() -> None:
    """Let TensorFlow run two operations beside each other where it would run one.

    One is the allreduce of a bucket, whose thread waits for the others meanwhile; with as many
    threads as a rank has cores, which is one, nothing would be computed until it is done. What the
    program has set or used already stays as it is.
    """
    asked = tf.config.threading.get_inter_op_parallelism_threads()
    if asked or "TF_NUM_INTEROP_THREADS" in os.environ or private_tensorflow.in_use():
        return
    if available_cores() == 1:
        tf.config.threading.set_inter_op_parallelism_threads(2)


def tower_devices(count: int) -> list[str]:
    """The names of the devices that ``bind`` got for so many towers.

    Raises:
        LaunchError: The program has taken some of them away since.
    """
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    if len(devices) < count:
        raise LaunchError(
            f"{count} towers (--devices-per-rank) need as many devices, but TensorFlow has "
            f"{len(devices)}: {', '.join(device.name for device in devices)}. Leave the choice of "
            "devices to hvdtrain.init(); don't set visible or logical devices after it."
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
        logger.warning(f"rank {ranks} of {len(visible)} found no GPU and will slow down the others")


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
        f"Rank {rank} sees {gpus} GPU{'s' * (gpus > 1)}, but is to compute on {each} (--mode "
        f"towers --devices-per-rank {each}). Give it {each} GPUs; or ask for {gpus}, with "
        f"HVDTRAIN_DEVICES_PER_RANK={gpus}; or compute on the CPU, with CUDA_VISIBLE_DEVICES=-1."
    )


def _no_gpu_left(
    rank: int, gpus: Sequence[str], owners: Mapping[str, Sequence[int]], each: int
) -> str:
    taken = "; ".join(
        f"{gpu}: rank {', '.join(map(str, owners[gpu]))}" for gpu in gpus if owners.get(gpu)
    )
    few, owned, remedy = "more ranks than GPUs", "all", "one rank a GPU"
    if each > 1:
        few, owned = f"too few GPUs for {each} a rank (--devices-per-rank)", "some"
        remedy = "fewer ranks, or ask for fewer devices"
    return (
        f"There are {few}: rank {rank} sees {len(gpus)}, and {owned} of them have owners "
        f"({taken}). Start {remedy}; or let ranks share, with HVDTRAIN_SHARE_GPUS=1 (hvdtrain run "
        "--share-gpus); or compute on the CPU, with CUDA_VISIBLE_DEVICES=-1."
    )


def _cuda_uuids() -> list[str]:
    """The ids of CUDA's devices in CUDA's order; none without a driver that works."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        # The second version tells the parts of a divided GPU apart.
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
