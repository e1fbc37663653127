"""Which GPU each process owns.

Launchers disagree about what a process sees. Under mpirun every rank of a host sees all GPUs;
under ``srun --gpus-per-task=1`` each sees one of its own, which all of them call number 0, and
``CUDA_VISIBLE_DEVICES`` may read the same on all. So ranks don't compare numbers: they tell each
other the GPUs' own ids, and share them out by those. Everyone decides for everyone, so that a
rank left without a GPU is the same error on every rank.

The number of threads is not set here: TensorFlow takes it from the cores that the launcher bound
the rank to, or from ``TF_NUM_INTRAOP_THREADS``, which ``hvdtrain run`` sets.
"""

from __future__ import annotations

import collections
import ctypes
import sys
from collections.abc import Mapping, Sequence

import tensorflow as tf

from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Settings
from hvdtrain.errors import LaunchError

__all__ = ["assign_gpus", "bind", "visible_gpus"]


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


def assign_gpus(visible: Sequence[Sequence[str] | None], *, share: bool) -> list[int | None]:
    """Give every rank one GPU of those it sees.

    Args:
        visible: For each rank the ids of the GPUs that it sees; None for one that needs none.
        share: Whether ranks may share a GPU when there are not enough.

    Returns:
        For each rank the index of its GPU in its own list, or None where it gets none. Where all
        ranks of a host see the same GPUs, that is the local rank.

    Raises:
        LaunchError: A rank sees only GPUs that other ranks own, and ``share`` is off.
    """
    owners: dict[str, list[int]] = collections.defaultdict(list)
    chosen: list[int | None] = []
    for rank, gpus in enumerate(visible):
        if not gpus:
            chosen.append(None)
            continue
        index = min(range(len(gpus)), key=lambda i: (len(owners[gpus[i]]), i))
        if owners[gpus[index]] and not share:
            raise LaunchError(_no_gpu_left(rank, gpus, owners))
        owners[gpus[index]].append(rank)
        chosen.append(index)
    return chosen


def bind(topology: Topology, settings: Settings, visible: Sequence[Sequence[str] | None]) -> None:
    """Make this rank's GPU the only one that TensorFlow uses; memory is taken as it is needed.

    Args:
        topology: Who this process is.
        settings: ``share_gpus`` and ``log_level`` count here.
        visible: What ``visible_gpus`` returned on each rank; None for one that needs no GPU.

    Raises:
        LaunchError: There are more ranks than GPUs, or TensorFlow uses its GPUs already.
    """
    index = assign_gpus(visible, share=settings.share_gpus)[topology.rank]
    if topology.is_chief and settings.log_level in ("debug", "info"):
        _report_missing(visible)
    if visible[topology.rank] is None:
        tf.config.set_visible_devices([], "GPU")
    if index is None:
        return
    gpu = tf.config.list_physical_devices("GPU")[index]
    try:
        if tf.config.get_visible_devices("GPU") != [gpu]:
            tf.config.set_visible_devices(gpu, "GPU")
        if not tf.config.experimental.get_memory_growth(gpu):
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise LaunchError(
            f"GPU {index} can't be given to rank {topology.rank}, because this program has used "
            f"TensorFlow's devices already ({error}). Call hvdtrain.init() first, before any "
            "tensor, variable or model is made."
        ) from None


def _report_missing(visible: Sequence[Sequence[str] | None]) -> None:
    without = [rank for rank, gpus in enumerate(visible) if gpus is not None and not gpus]
    if not without:
        return
    if not any(visible):
        text = "no GPU found; computing on the CPU"
    else:
        ranks = ", ".join(map(str, without))
        text = f"rank {ranks} of {len(visible)} found no GPU and will slow down the others"
    print(f"hvdtrain: {text}", file=sys.stderr, flush=True)


def _no_gpu_left(rank: int, gpus: Sequence[str], owners: Mapping[str, Sequence[int]]) -> str:
    taken = "; ".join(
        f"{gpu}: rank {', '.join(map(str, owners[gpu]))}" for gpu in gpus if owners.get(gpu)
    )
    return (
        f"There are more ranks than GPUs: rank {rank} sees {len(gpus)}, and all of them have "
        f"owners ({taken}). Start one rank a GPU; or let ranks share, with HVDTRAIN_SHARE_GPUS=1 "
        "(hvdtrain run --share-gpus); or compute on the CPU, with CUDA_VISIBLE_DEVICES=-1."
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
