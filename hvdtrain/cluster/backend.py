"""What combines gradients: a decision from who started the ranks, and what was asked for."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hvdtrain.cluster.topology import Topology
from hvdtrain.errors import ConfigurationError, LaunchError

__all__ = ["Backend", "Choice", "choose_backend"]

Backend = Literal["mpi", "horovod"]


class Choice(NamedTuple):
    """What it is, and why."""

    backend: Backend
    reason: str


def choose_backend(topology: Topology, asked: str, *, has_servers: bool = False) -> Choice:
    """Decide; the same on all ranks.

    Args:
        topology: Of this process.
        asked: The setting.
        has_servers: Whether some ranks are parameter servers.

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
    if asked == "auto":
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
