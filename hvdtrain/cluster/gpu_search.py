"""The search for the GPUs that a rank can use, and the chief's report on the GPUs of all ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence

from hvdtrain.cluster.gpu_assignment import RankGpus, describe_sharing, gpu_warnings
from hvdtrain.cluster.gpu_problems import gpu_problems
from hvdtrain.cluster.gpus import GpuReader, cuda_gpus, describe_gpus
from hvdtrain.cluster.placement import select_part, visible_entries
from hvdtrain.errors import LaunchError

__all__ = ["log_gpus", "search_gpus"]

logger = logging.getLogger(__package__)

# Queries usually take milliseconds, but a GPU that is being reset answers late or never.
DRIVER_TIMEOUT_S = 5.0


def search_gpus(
    local_rank: int,
    environ: MutableMapping[str, str],
    *,
    count: Callable[[], int],
    obstacle: Callable[[], str],
    needed: bool = True,
) -> RankGpus:
    """Find the GPUs that this process sees, before any rank of the job uses one.

    NVIDIA's MIG divides a GPU into parts. If ``environ`` lists several parts, it is changed to list
    only the part of this rank.

    Args:
        local_rank: The index of this process on its host.
        environ: The environment of this process.
        count: Returns the number of GPUs that the framework sees.
        obstacle: Returns why the framework sees no GPU. It is called if CUDA shows one.
        needed: Whether this rank needs a GPU.
    """
    rank = RankGpus(hostname=socket.gethostname(), pid=os.getpid(), visible=None)
    if not needed:
        return rank
    select_part(environ, local_rank)
    visible = describe_gpus(count(), rank.hostname, environ)
    if not visible:
        is_hidden = visible_entries(environ) == []
        why = "" if is_hidden else _find_obstacle(obstacle)
        return dataclasses.replace(rank, visible=[], obstacle=why)
    try:
        states = GpuReader().read(DRIVER_TIMEOUT_S)
    except LaunchError as error:
        logger.debug("the state of the GPUs is unknown: %s", error)
        states = []
    ids = {gpu.id for gpu in visible}
    suspects = [state for state in states if state.id in ids and any(gpu_problems(state))]
    return dataclasses.replace(rank, visible=visible, suspects=suspects)


def _find_obstacle(obstacle: Callable[[], str]) -> str:
    """Return why the framework sees none of this host's GPUs; empty if CUDA sees none."""
    try:
        # With a broken GPU, the driver never answers, and neither does CUDA.
        states = GpuReader(faults=False).read(DRIVER_TIMEOUT_S)
    except LaunchError:
        return ""
    try:
        return obstacle() if cuda_gpus() else ""
    except LaunchError as error:
        # CUDA also fails on hosts without GPUs, if they have its library.
        return str(error) if states else ""


def log_gpus(ranks: Sequence[RankGpus], chosen: Sequence[Sequence[int]]) -> None:
    """Log which ranks share a GPU, and warnings about missing, faulty, busy and unequal GPUs."""
    if not any(chosen) and any(one.visible is not None for one in ranks):
        logger.info("no GPU found; computing on the CPU")
    if sharing := describe_sharing(ranks, chosen):
        logger.info("GPUs are shared: %s", sharing)
    for warning in gpu_warnings(ranks, chosen):
        logger.warning(warning)
