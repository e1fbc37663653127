"""GPUs and random generators of programs that use PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np
import torch

from hvdtrain.cluster.gpu_assignment import RankGpus, assign_gpus, first_gpus
from hvdtrain.cluster.gpu_search import log_gpus, search_gpus
from hvdtrain.cluster.gpus import Gpu
from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings

__all__ = [
    "bind",
    "capabilities",
    "find_gpus",
    "random_state",
    "reserve_thread_for_buckets",
    "restore_random_state",
    "set_seed_unless_set",
    "set_up",
]

_CPU_STATE, _GPU_STATE = "torch", "torch gpu"
_GPU_STATE_BYTES = 16


def set_up(settings: Settings, collectives: Engine) -> None:
    """Do nothing, because PyTorch needs no settings."""


def find_gpus(
    topology: Topology, environ: MutableMapping[str, str], *, needed: bool = True
) -> RankGpus:
    """Return the GPUs that PyTorch sees, as ``search_gpus`` describes."""
    return search_gpus(
        topology.local_rank,
        environ,
        count=torch.cuda.device_count,  # initializes none of them
        obstacle=_obstacle,
        needed=needed,
    )


def _obstacle() -> str:
    if torch.version.cuda is None:
        return (
            "PyTorch is built without CUDA: install a build with CUDA, or set "
            "CUDA_VISIBLE_DEVICES=-1 to compute on the CPU"
        )
    return "PyTorch can't use them: python -c 'import torch; torch.cuda.init()' shows why"


def bind(topology: Topology, settings: Settings, ranks: Sequence[RankGpus]) -> list[Gpu | None]:
    """Make this rank's GPU the current device of PyTorch, and return the GPU of each rank.

    Raises:
        LaunchError: If there are too few GPUs.
    """
    chosen = assign_gpus([one.visible for one in ranks], share=settings.share_gpus)
    if topology.is_chief:
        log_gpus(ranks, chosen)
    for index in chosen[topology.rank]:
        torch.cuda.set_device(index)
    return first_gpus(ranks, chosen)


def capabilities(environ: Mapping[str, str], *, several_hosts: bool) -> None:
    """Return None. With PyTorch, gradients are combined in host memory and not on devices."""


def reserve_thread_for_buckets() -> None:
    """Do nothing. Collectives of ``hvdtrain.torch`` run in a separate thread."""


def set_seed_unless_set(seed: int) -> None:
    """Do nothing, because the program seeds PyTorch's generators itself."""


def random_state() -> dict[str, np.ndarray]:
    """Return the states of the generators of the CPU and of this rank's GPU.

    The shapes and dtypes are the same on every rank. Without a GPU, its state is zero.
    """
    gpu = np.zeros(_GPU_STATE_BYTES, np.uint8)
    if torch.cuda.is_available():
        gpu = torch.cuda.get_rng_state().numpy()
    return {_CPU_STATE: torch.get_rng_state().numpy(), _GPU_STATE: gpu}


def restore_random_state(state: Mapping[str, np.ndarray]) -> None:
    """Restore the result of ``random_state``. States of zeros and missing states are skipped."""
    if _CPU_STATE in state and state[_CPU_STATE].any():
        torch.set_rng_state(torch.from_numpy(state[_CPU_STATE].copy()))
    if _GPU_STATE in state and state[_GPU_STATE].any() and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state[_GPU_STATE].copy()))
