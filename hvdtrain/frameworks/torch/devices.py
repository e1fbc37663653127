"""Binding of ranks to GPUs in programs that use PyTorch."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence

import torch

from hvdtrain.cluster.gpu_assignment import (
    RankGpus,
    assign_gpus,
    describe_sharing,
    first_gpus,
    gpu_warnings,
)
from hvdtrain.cluster.gpus import Gpu, describe_gpus
from hvdtrain.cluster.placement import select_part
from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError

__all__ = [
    "bind",
    "capabilities",
    "find_gpus",
    "reserve_thread_for_buckets",
    "set_seed_unless_set",
    "set_up",
]

logger = logging.getLogger(__package__)


def set_up(settings: Settings) -> None:
    """Check that the settings support PyTorch.

    Raises:
        ConfigurationError: If the mode or the backend needs TensorFlow.
    """
    if settings.mode != "allreduce":
        raise ConfigurationError(
            f"--mode {settings.mode} needs Keras on TensorFlow, but the program uses PyTorch; omit "
            "it."
        )
    if settings.backend == "nccl":
        raise ConfigurationError(
            "--backend nccl (HVDTRAIN_BACKEND) needs TensorFlow, but the program uses PyTorch, "
            "whose gradients are combined in host memory; omit it."
        )


def find_gpus(
    topology: Topology, environ: MutableMapping[str, str], *, needed: bool = True
) -> RankGpus:
    """Return the GPUs that PyTorch sees, without initializing any of them."""
    hostname = socket.gethostname()
    visible: list[Gpu] | None = None
    if needed:
        select_part(environ, topology.local_rank)
        visible = describe_gpus(torch.cuda.device_count(), hostname, environ)
    return RankGpus(hostname=hostname, pid=os.getpid(), visible=visible)


def bind(topology: Topology, settings: Settings, ranks: Sequence[RankGpus]) -> list[Gpu | None]:
    """Make this rank's GPU the current device of PyTorch, and return the GPU of each rank.

    Raises:
        LaunchError: If there are too few GPUs.
    """
    chosen = assign_gpus([one.visible for one in ranks], share=settings.share_gpus)
    if topology.is_chief:
        if sharing := describe_sharing(ranks, chosen):
            logger.info("GPUs are shared: %s", sharing)
        for warning in gpu_warnings(ranks, chosen):
            logger.warning(warning)
    for index in chosen[topology.rank]:
        torch.cuda.set_device(index)
    return first_gpus(ranks, chosen)


def capabilities(environ: Mapping[str, str], *, several_hosts: bool) -> None:
    """Return None. With PyTorch, gradients are combined in host memory and not on devices."""


def reserve_thread_for_buckets() -> None:
    """Do nothing. Collectives of ``hvdtrain.torch`` run in a thread of their own."""


def set_seed_unless_set(seed: int) -> None:
    """Do nothing, because the program seeds PyTorch's generators itself."""
