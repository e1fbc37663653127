"""The choice of the backend, from who started the ranks, what they have, and what was asked.

``choose_backend`` finds the engine, by which ranks then tell each other what ``choose_for_devices``
needs to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hvdtrain.cluster.topology import Topology
from hvdtrain.errors import ConfigurationError, LaunchError

__all__ = ["Choice", "DeviceCapabilities", "choose_backend", "choose_for_devices"]


class Choice(NamedTuple):
    """A backend, and why it is that one."""

    backend: Literal["mpi", "nccl", "horovod"]
    reason: str


class DeviceCapabilities(NamedTuple):
    """A rank's capabilities for combining gradients on its device, where they are.

    Attributes:
        gpu: The id of the first GPU that it owns; empty where it computes on the CPU.
        has_nccl: Whether its TensorFlow comes with NCCL.
        ready: Whether its TensorFlow can still be told of the other ranks.
    """

    gpu: str
    has_nccl: bool
    ready: bool


def choose_backend(topology: Topology, asked: str, *, has_servers: bool = False) -> Choice:
    """Decide from what was ``asked`` for with ``--backend``; the same on all ranks.

    Raises:
        LaunchError: The ranks can't communicate that way.
        ConfigurationError: Parameter servers can't.
    """
    without_mpi = topology.launcher == "horovod-gloo" and topology.size > 1
    if asked == "mpi" and without_mpi:
        raise LaunchError(
            f"horovodrun --gloo started this as rank {topology.rank} of {topology.size} "
            "(HOROVOD_RANK, HOROVOD_SIZE) without MPI, and --backend mpi (HVDTRAIN_BACKEND) asks "
            "for it. Leave that out, or use horovodrun --mpi, mpirun, or hvdtrain run "
            f"-np {topology.size} -- python ... instead."
        )
    if asked in ("auto", "nccl"):
        if not without_mpi:
            return Choice("mpi", "the ranks can use MPI")
        choice = Choice("horovod", "horovodrun --gloo started the ranks, without MPI")
    else:
        choice = Choice("horovod" if asked == "horovod" else "mpi", f"--backend {asked}")
    if choice.backend == "horovod" and has_servers:
        raise ConfigurationError(
            f"Parameter servers need MPI, and a real Horovod is what ranks have ({choice.reason}). "
            "Start with horovodrun --mpi, mpirun, srun or hvdtrain run, without --backend "
            "horovod; or train with --mode allreduce."
        )
    return choice


def choose_for_devices(
    asked: str, capabilities: Sequence[DeviceCapabilities], *, has_servers: bool, elastic: bool
) -> Choice:
    """Decide whether dense gradients are combined by the engine, or where they are.

    ``capabilities`` holds those of each rank, in rank order.

    Raises:
        LaunchError: ``nccl`` was asked for, and what ranks have does not allow it.
        ConfigurationError: It was, and other settings don't.
    """
    if asked == "mpi":
        return Choice("mpi", "--backend mpi")
    if has_servers or elastic:
        what = (
            "some ranks are parameter servers" if has_servers else "ranks may be lost (--elastic)"
        )
        if asked == "nccl":
            raise ConfigurationError(
                f"--backend nccl (HVDTRAIN_BACKEND) needs all ranks for each step, and {what}. "
                "Leave one of both out."
            )
        return Choice("mpi", what)
    obstacle = _obstacle(capabilities, needs_gpus=asked == "auto")
    if asked == "auto":
        return Choice("mpi", obstacle) if obstacle else Choice("nccl", "every rank has a GPU")
    if obstacle:
        raise LaunchError(
            f"--backend nccl (HVDTRAIN_BACKEND) can't be used: {obstacle}. Mend that, or leave it "
            "out: then MPI combines gradients."
        )
    on_cpus = "" if capabilities[0].gpu else " (by TensorFlow's ring on CPUs, as no rank has a GPU)"
    return Choice("nccl", f"--backend nccl{on_cpus}")


def _obstacle(capabilities: Sequence[DeviceCapabilities], *, needs_gpus: bool) -> str:
    """Return why the ranks can't reduce on their devices; empty where they can."""
    without = [rank for rank, mine in enumerate(capabilities) if not mine.gpu]
    if len(without) == len(capabilities):
        if needs_gpus:
            return "no rank has a GPU"
    elif without:
        return f"{_ranks(without)} without a GPU, and others have one"
    else:
        owners = Counter(mine.gpu for mine in capabilities)
        shared = [rank for rank, mine in enumerate(capabilities) if owners[mine.gpu] > 1]
        if shared:
            return f"{_ranks(shared)} sharing a GPU, which NCCL does not allow"
        lacking = [rank for rank, mine in enumerate(capabilities) if not mine.has_nccl]
        if lacking:
            return f"{_ranks(lacking)} using a TensorFlow without NCCL"
    late = [rank for rank, mine in enumerate(capabilities) if not mine.ready]
    if late:
        return f"{_ranks(late)} late: the program used TensorFlow's devices before hvdtrain.init()"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    several = len(ranks) > 1
    return f"rank{'s' * several} {', '.join(map(str, ranks))} {'are' if several else 'is'}"
