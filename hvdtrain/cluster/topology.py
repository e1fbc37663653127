"""Rank, size and place of this process, as its launcher left them in the environment; its host.

A process can carry the variables of several launchers at once. They are asked in this order:

1. **Open MPI's and Hydra's mpirun.** Under Slurm they start their ranks inside a job step or a
   batch script, so that Slurm's variables are there too and describe something else.
2. **horovodrun --gloo**, which starts processes that MPI knows nothing of.
3. **srun**, by its step's variables. The batch script of ``sbatch`` also sees ``SLURM_PROCID=0``
   and the job's ``SLURM_NTASKS``, but no ``SLURM_STEP_NUM_TASKS``; a shell of ``salloc`` sees
   neither, or is a step of one task. ``sbatch`` called inside a step passes that step's variables
   on: then ``SLURM_GTIDS``, which Slurm always sets anew, lists other tasks than the step had.
4. None: this process is alone.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.errors import LaunchError

__all__ = ["Launcher", "Topology", "host_id", "read_topology", "slurm_task_counts"]

Launcher = Literal["openmpi", "hydra", "horovod-gloo", "slurm", "none"]

_STARTED_BY: dict[Launcher, str] = {
    "openmpi": "Open MPI's mpirun",
    "hydra": "Hydra's mpirun (MPICH, Intel MPI)",
    "horovod-gloo": "horovodrun --gloo",
    "slurm": "srun",
}
# The variables that hold the rank, size, local rank and local size.
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
    """The place of one process in the job.

    Attributes:
        rank: Number of this process, ``0 <= rank < size``; rank 0 is the chief.
        size: Processes in the job.
        local_rank: Number of this process among those of the job on its host.
        local_size: Processes of the job on this host.
        node_rank: Index of this host among the hosts of the job. ``None`` where the launcher
            doesn't tell (any mpirun on several hosts; Open MPI's ``OMPI_COMM_WORLD_NODE_RANK``
            is not it, but the process's number on its host); ``hvdtrain.init()`` then fills it
            in from what the ranks tell each other.
        launcher: Who started this process; ``"none"`` when it is alone.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int | None = 0
    launcher: Launcher = "none"

    @property
    def is_chief(self) -> bool:
        """Whether this process prints, logs and saves for all."""
        return self.rank == 0


def read_topology(environ: Mapping[str, str]) -> Topology:
    """Work out who this process is; see the module's text for which variables win.

    Raises:
        LaunchError: Variables contradict each other, some are missing, or the launcher is one
            whose processes can't communicate without Horovod.
    """
    if "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return _from_variables(environ, "openmpi")
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE as well, but never the local ones.
    if "MPI_LOCALRANKID" in environ and "PMI_RANK" in environ:
        return _from_variables(environ, "hydra")
    if "HOROVOD_RANK" in environ:
        return _from_variables(environ, "horovod-gloo")
    topology = _read_slurm(environ)
    if topology is not None:
        return topology
    if _int_or_none(environ.get("PMI_SIZE")) not in (None, 1):
        raise LaunchError(
            f"An MPI launcher set PMI_RANK={environ.get('PMI_RANK')!r} and "
            f"PMI_SIZE={environ['PMI_SIZE']!r}, but neither MPI_LOCALRANKID and MPI_LOCALNRANKS "
            "(Hydra's mpirun) nor SLURM_PROCID and SLURM_STEP_NUM_TASKS (srun), so that the ranks "
            "of a host can't be told apart. Start with mpirun of Open MPI, MPICH or Intel MPI, "
            "with srun, or with hvdtrain run; if the variables are left from another program, "
            "unset PMI_RANK PMI_SIZE."
        )
    return Topology()


def host_id() -> str:
    """Returns what all processes of a host share, and no process of another host or container.

    Names alone can repeat ("localhost"); so can the kernel's start, among containers.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()} {started}"


def _from_variables(environ: Mapping[str, str], launcher: Launcher) -> Topology:
    """The topology that the four variables of a launcher describe."""
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


def _read_slurm(environ: Mapping[str, str]) -> Topology | None:
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    launcher: Launcher = "slurm"
    node = _integer(environ, "SLURM_NODEID", launcher)
    per_node = _tasks_per_node(environ)
    if node >= len(per_node) or not _is_task_of_step(environ, per_node[node]):
        return None
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    rank, size, local_rank = (_integer(environ, name, launcher) for name in names)
    topology = Topology(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=per_node[node],
        node_rank=node,
        launcher=launcher,
    )
    _check(topology, environ, (*names, "SLURM_STEP_TASKS_PER_NODE"))
    return topology


def _is_task_of_step(environ: Mapping[str, str], local_size: int) -> bool:
    """Whether the task that Slurm started here is one of the step that the variables describe."""
    tasks = environ.get("SLURM_GTIDS")
    if tasks is None:
        return True
    ids = tasks.split(",")
    return len(ids) == local_size and environ["SLURM_PROCID"] in ids


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """The step's tasks on each of its nodes."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = _text(environ, name, "slurm")
    try:
        return slurm_task_counts(text)
    except ValueError as error:
        raise LaunchError(
            f"srun set {name}={text!r}, which {error}. If it is left from another job, unset it."
        ) from None


def slurm_task_counts(text: str) -> list[int]:
    """The tasks on each node; Slurm writes ``2(x3),1`` for 2, 2, 2, 1.

    Raises:
        ValueError: With what can't be read and what is expected, as the end of a sentence.
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise ValueError(f"can't be read at {entry!r}; expected counts like 4 or 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _check(topology: Topology, environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    if (
        0 <= topology.rank < topology.size
        and 0 <= topology.local_rank < topology.local_size
        and topology.local_size <= topology.size
    ):
        return
    received = ", ".join(f"{name}={environ[name]}" for name in names)
    raise LaunchError(
        f"{_STARTED_BY[topology.launcher]} set {received}, which can't all be true: expected "
        f"0 <= rank < size and 0 <= local rank < local size <= size. {_unset(names)}"
    )


def _integer(environ: Mapping[str, str], name: str, launcher: Launcher) -> int:
    text = _text(environ, name, launcher)
    value = _int_or_none(text)
    if value is None:
        raise LaunchError(
            f"{_STARTED_BY[launcher]} set {name}={text!r}; expected a whole number. "
            f"{_unset((name,))}"
        )
    return value


def _text(environ: Mapping[str, str], name: str, launcher: Launcher) -> str:
    text = environ.get(name)
    if text is None:
        raise LaunchError(
            f"This process carries variables of {_STARTED_BY[launcher]}, but {name} is missing. "
            "Start the program again with mpirun, srun or hvdtrain run, and pass the whole "
            "environment on to it; or unset the others to run it alone."
        )
    return text


def _int_or_none(text: str | None) -> int | None:
    """Returns the whole number that ``text`` holds, None for something else."""
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _unset(names: tuple[str, ...]) -> str:
    return f"If they are left from another job, run: unset {' '.join(names)}"
