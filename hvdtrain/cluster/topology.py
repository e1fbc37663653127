"""Rank, size and host of this process, from the environment that its launcher set.

A process can have the variables of several launchers at once. The first match in this order wins:

1. **Open MPI's and Hydra's mpirun.** Under Slurm they run inside a job step or a batch script,
   whose Slurm variables describe something else.
2. **horovodrun --gloo**, whose processes are independent of MPI.
3. **srun**, which sets variables for its step. A batch script has ``SLURM_PROCID=0`` and the job's
   ``SLURM_NTASKS``, but not ``SLURM_STEP_NUM_TASKS``. A shell that ``salloc`` starts has neither
   variable, or is a step with one task. ``sbatch`` inside a step passes that step's variables on to
   the batch script. But Slurm always sets ``SLURM_GTIDS`` again, so in this case it doesn't match
   the other variables.
4. **No launcher.** The process runs alone.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.cluster.hosts import slurm_task_counts
from hvdtrain.errors import LaunchError

__all__ = ["Launcher", "Topology", "host_id", "read_topology"]

Launcher = Literal["openmpi", "hydra", "horovod-gloo", "slurm", "none"]

_LAUNCHER_NAMES: dict[Launcher, str] = {
    "openmpi": "Open MPI's mpirun",
    "hydra": "Hydra's mpirun (MPICH, Intel MPI)",
    "horovod-gloo": "horovodrun --gloo",
    "slurm": "srun",
}
# Variables with the rank, size, local rank and local size.
_VARIABLES: dict[Launcher, tuple[str, str, str, str]] = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "horovod-gloo": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The place of one process in the job."""

    rank: int = 0  # index of this process in the job; rank 0 is the chief
    size: int = 1  # number of processes in the job
    local_rank: int = 0  # index of this process on its host
    local_size: int = 1  # number of processes of the job on this host
    # Index of this host among the hosts of the job. None until ``hvdtrain.init()`` if the launcher
    # doesn't provide the index. mpirun on several hosts doesn't (``OMPI_COMM_WORLD_NODE_RANK`` is a
    # local rank).
    node_rank: int | None = 0
    launcher: Launcher = "none"  # the launcher of this process; ``"none"`` if it runs alone

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which prints, logs and saves for all ranks."""
        return self.rank == 0


def read_topology(environ: Mapping[str, str]) -> Topology:
    """Read the place of this process in its job.

    Raises:
        LaunchError: If variables are missing, invalid, or contradict each other, or the launcher is
            not supported.
    """
    if "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return _from_variables(environ, "openmpi")
    # srun --mpi=pmi2 also sets PMI_RANK and PMI_SIZE, but not the local variables.
    if "MPI_LOCALRANKID" in environ and "PMI_RANK" in environ:
        return _from_variables(environ, "hydra")
    if "HOROVOD_RANK" in environ:
        return _from_variables(environ, "horovod-gloo")
    topology = _from_slurm(environ)
    if topology is not None:
        return topology
    if _parse_int(environ.get("PMI_SIZE")) not in (None, 1):
        raise LaunchError(
            f"An MPI launcher set PMI_RANK={environ.get('PMI_RANK')!r} and "
            f"PMI_SIZE={environ['PMI_SIZE']!r}, but neither MPI_LOCALRANKID and MPI_LOCALNRANKS "
            "(Hydra's mpirun) nor SLURM_PROCID and SLURM_STEP_NUM_TASKS (srun), so the local ranks "
            "are unknown. Start with mpirun of Open MPI, MPICH or Intel MPI, with srun, or with "
            "hvdtrain run; if the variables are left from another program, unset PMI_RANK PMI_SIZE."
        )
    return Topology()


def host_id() -> str:
    """Return an identifier that only the processes of this host or container share.

    The identifier contains the host's name and boot ID. Different hosts may have the same name
    ("localhost"), and containers share the boot ID of their host.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.exists() else ''}"


def _from_variables(environ: Mapping[str, str], launcher: Launcher) -> Topology:
    names = _VARIABLES[launcher]
    rank, size, local_rank, local_size = (_integer(environ, name, launcher) for name in names)
    topology = Topology(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=0 if local_size == size else None,
        launcher=launcher,
    )
    _check(topology, environ, names)
    return topology


def _from_slurm(environ: Mapping[str, str]) -> Topology | None:
    """Return the place of this process if it is a task of srun, otherwise None."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    counts_name = "SLURM_STEP_TASKS_PER_NODE"
    counts_text = _require(environ, counts_name, "slurm")
    try:
        counts = slurm_task_counts(counts_text)
    except ValueError as error:
        raise LaunchError(
            f"srun set {counts_name}={counts_text!r}, which is invalid: {error}. "
            f"{_unset_hint(counts_name)}"
        ) from None
    node = _integer(environ, "SLURM_NODEID", "slurm")
    if node >= len(counts):
        return None
    task_ids = environ.get("SLURM_GTIDS")
    if task_ids is not None:
        ids = task_ids.split(",")
        if len(ids) != counts[node] or environ["SLURM_PROCID"] not in ids:
            return None
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    rank, size, local_rank = (_integer(environ, name, "slurm") for name in names)
    topology = Topology(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=counts[node],
        node_rank=node,
        launcher="slurm",
    )
    _check(topology, environ, (*names, counts_name))
    return topology


def _check(topology: Topology, environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    if (
        0 <= topology.rank < topology.size
        and 0 <= topology.local_rank < topology.local_size
        and topology.local_size <= topology.size
    ):
        return
    values = ", ".join(f"{name}={environ[name]}" for name in names)
    raise LaunchError(
        f"{_LAUNCHER_NAMES[topology.launcher]} set {values}, which contradict each other: expected "
        f"0 <= rank < size and 0 <= local rank < local size <= size. {_unset_hint(*names)}"
    )


def _integer(environ: Mapping[str, str], name: str, launcher: Launcher) -> int:
    text = _require(environ, name, launcher)
    value = _parse_int(text)
    if value is None:
        raise LaunchError(
            f"{_LAUNCHER_NAMES[launcher]} set {name}={text!r}, which is not a whole number. "
            f"{_unset_hint(name)}"
        )
    return value


def _require(environ: Mapping[str, str], name: str, launcher: Launcher) -> str:
    if name not in environ:
        raise LaunchError(
            f"{name} is missing, although this process has other variables of "
            f"{_LAUNCHER_NAMES[launcher]}. Start the program again with mpirun, srun or hvdtrain "
            "run and pass it the whole environment; or unset the other variables to run it alone."
        )
    return environ[name]


def _parse_int(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _unset_hint(*names: str) -> str:
    return f"If they are left from another job, run: unset {' '.join(names)}"
