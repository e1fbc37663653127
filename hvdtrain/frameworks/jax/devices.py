"""Binding of ranks to GPUs in programs that use JAX."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence

import jax

from hvdtrain.cluster.gpu_assignment import RankGpus, assign_gpus, describe_sharing, first_gpus
from hvdtrain.cluster.gpu_search import log_gpus, search_gpus
from hvdtrain.cluster.gpus import Gpu, cuda_gpus
from hvdtrain.cluster.placement import available_cores
from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.errors import LaunchError
from hvdtrain.frameworks.jax.step_errors import errors
from hvdtrain.private_api.jax import in_use

__all__ = [
    "bind",
    "capabilities",
    "find_gpus",
    "reserve_thread_for_buckets",
    "set_seed_unless_set",
    "set_up",
]

logger = logging.getLogger(__package__)

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# XLA reads it when JAX is first used.
_THREADS = "NPROC"
# The variables by which users limit the memory that each process reserves.
_MEMORY = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def set_up(settings: Settings, collectives: Engine) -> None:
    """Run collectives of Python code after those of compiled functions that still run.

    JAX knows only the functions that the same thread has started.
    """
    collectives.before_operation = errors.wait
    # On the CPU, a callback of a compiled function may wait for a second thread of JAX, which has
    # as many threads as the process has cores.
    if (os.environ.get(_THREADS) or str(available_cores())) == "1":
        os.environ[_THREADS] = "2"


def find_gpus(
    topology: Topology, environ: MutableMapping[str, str], *, needed: bool = True
) -> RankGpus:
    """Return the GPUs that JAX would use. CUDA counts them, because JAX would reserve them."""
    platforms = jax.config.jax_platforms or ""
    uses_cuda = not platforms or "cuda" in platforms or "gpu" in platforms
    return search_gpus(
        topology.local_rank,
        environ,
        count=lambda: len(cuda_gpus()) if uses_cuda and _has_cuda() else 0,
        obstacle=_obstacle,
        needed=needed,
    )


def _has_cuda() -> bool:
    return any(importlib.util.find_spec(name) for name in _PLUGINS)


def _obstacle() -> str:
    if not _has_cuda():
        return (
            'JAX is installed without CUDA: python -m pip install "jax[cuda12]", or set '
            "CUDA_VISIBLE_DEVICES=-1 to compute on the CPU"
        )
    return f"JAX is restricted to other platforms (JAX_PLATFORMS={jax.config.jax_platforms})"


def bind(topology: Topology, settings: Settings, ranks: Sequence[RankGpus]) -> list[Gpu | None]:
    """Restrict JAX to this rank's GPU, and return the GPU of each rank.

    Raises:
        LaunchError: If there are too few GPUs, or if JAX already uses all of them.
    """
    visible = [one.visible for one in ranks]
    chosen = assign_gpus(visible, share=settings.share_gpus)
    if topology.is_chief:
        log_gpus(ranks, chosen)
        if describe_sharing(ranks, chosen) and not any(name in os.environ for name in _MEMORY):
            logger.warning(
                "ranks share GPUs, and each JAX process reserves 75 % of a GPU's memory; set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION to less than 1 / (ranks per GPU)"
            )
    _restrict(visible[topology.rank], chosen[topology.rank], topology.rank)
    return first_gpus(ranks, chosen)


def _restrict(visible: Sequence[Gpu] | None, indices: Sequence[int], rank: int) -> None:
    """Restrict JAX to the GPUs with these indices. If ``visible`` is None, use no GPU."""
    if visible is None:
        if not in_use():
            jax.config.update("jax_platforms", "cpu")
    elif indices and in_use():
        if len(visible) > len(indices):
            raise LaunchError(
                f"Rank {rank} can't use GPU {', '.join(map(str, indices))} only, because the "
                "program has already used JAX's devices, and JAX has reserved memory on all "
                f"{len(visible)} GPUs. Call hvdtrain.init() first, before creating any array or "
                "model."
            )
    elif indices:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, indices)))


def capabilities(environ: Mapping[str, str], *, several_hosts: bool) -> None:
    """Return None. With JAX, gradients are combined in host memory and not on devices."""


def reserve_thread_for_buckets() -> None:
    """Do nothing, because JAX reduces all gradients of a step together."""


def set_seed_unless_set(seed: int) -> None:
    """Do nothing, because every random function of JAX takes a seed."""
