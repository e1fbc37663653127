"""Commands that start a job, made from a plan without starting anything: argv and environment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.cluster.placement import Place
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.starters import Mpirun, Srun

__all__ = [
    "OVER_TCP",
    "Command",
    "Plan",
    "forwarded",
    "hides_information",
    "hostfile_text",
    "is_information",
    "mpirun_command",
    "network_variables",
    "rank_environment",
    "srun_command",
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``program`` once in each of ``places``, in the order of ranks.

    Attributes:
        places: Where the ranks run.
        program: The command that mpirun or srun starts for each of them.
        local: Whether all of them run on this host.
        oversubscribed: Whether ranks of some host share its cores.
        elastic: Whether the ranks go on without one that is lost; for Open MPI 5.
    """

    places: tuple[Place, ...]
    program: tuple[str, ...]
    local: bool
    oversubscribed: bool = False
    elastic: bool = False

    @property
    def hosts(self) -> dict[str, int]:
        """The hosts in their order, and how many ranks each has."""
        return dict(Counter(place.host for place in self.places))

    @property
    def critical(self) -> dict[int, str]:
        """Roles of the ranks whose place no other can take; empty where there are no servers."""
        if all(place.role != "ps" for place in self.places):
            return {}
        names = {"ps": "a parameter server", "chief": "the chief"}
        return {place.rank: names[place.role] for place in self.places if place.role in names}


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to start: the program with its arguments, and its whole environment."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


def hostfile_text(plan: Plan) -> str:
    """The hosts of ``plan`` and their ranks, as Open MPI reads them from a file."""
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
    """The command that starts ``plan`` through mpirun, on its hosts and nowhere else.

    Inside an allocation (Slurm, PBS, LSF) mpirun would look for hosts by itself; the arguments
    keep it from that. ``environ`` is as ``rank_environment`` makes it, ``hostfile`` holds what
    ``hostfile_text`` makes, and ``names`` are those of the variables to pass on to other hosts.

    Raises:
        ConfigurationError: A host that mpirun can't be told.
    """
    if mpirun.family == "hydra":
        where = _hydra_hosts(plan)
        # Before the user's own: ssh takes the first -l or -p.
        given = {name: " ".join((*ssh, environ.get(name, ""))).strip() for name in _HYDRA_SSH}
        environ = {**environ, **given} if ssh else environ
    else:
        where = _openmpi_hosts(plan, mpirun, names, hostfile, ssh)
        environ = {**_openmpi_defaults(plan, as_root), **environ}
    argv = (str(mpirun.path), "-np", str(len(plan.places)), *where, *more, *plan.program)
    return Command(argv=argv, environ=environ)


def srun_command(plan: Plan, srun: Srun, environ: Mapping[str, str], *, hostfile: Path) -> Command:
    """The command that starts ``plan`` as a step of the Slurm job around it.

    srun passes all of ``environ`` on. ``hostfile`` names the host of each rank, one a line: so the
    plan is what happens.
    """
    mpi = (f"--mpi={srun.plugin}",) if srun.plugin else ()
    argv = (
        *(str(srun.path), *mpi, f"--ntasks={len(plan.places)}", f"--nodes={len(plan.hosts)}"),
        *("--distribution=arbitrary", f"--nodelist={hostfile}"),
        # A shell inside the allocation is a step as well, and holds what the ranks need.
        *("--overlap", "--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1"),
        *plan.program,
    )
    return Command(argv=argv, environ={**environ, "SLURM_HOSTFILE": str(hostfile)})


# Where MPICH and Intel MPI look for options of ssh.
_HYDRA_SSH = ("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
_ALLOCATIONS = "^slurm,tm,pbs,lsf,gridengine"
_REMOTE_STARTERS = "^slurm,tm,lsf"
_SYSTEM_PREFIX = Path("/usr")


def _openmpi_hosts(
    plan: Plan, mpirun: Mpirun, names: Sequence[str], hostfile: Path, ssh: Sequence[str]
) -> tuple[str, ...]:
    is_version_4 = mpirun.family == "openmpi4"
    mca = "--mca" if is_version_4 else "--prtemca"
    alone: tuple[str, ...] = (mca, "ras", _ALLOCATIONS, mca, "plm", _REMOTE_STARTERS)
    # Open MPI binds each rank to one core by default (one of many, on most hosts), and refuses
    # more ranks than cores. Each agent takes its rank's share of the cores instead.
    mapping = ("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none")
    if plan.elastic:
        alone = ("--with-ft", "ulfm", *alone)
    prefix = mpirun.path.parent.parent
    # Version 4 puts its folder before the user's PATH; the system's has another Python in it.
    where: tuple[str, ...] = ("--noprefix",) if prefix == _SYSTEM_PREFIX else ()
    if plan.local:
        return (*alone, *mapping, *where)
    if not is_version_4 and any(map(_is_ipv6, plan.hosts)):
        # A colon ends the name in -H, brackets or not.
        hosts = ("--hostfile", str(hostfile))
    else:
        hosts = ("-H", _host_list(plan))
    where = where or ("--prefix", str(prefix))
    variables = [word for name in names for word in ("-x", name)]
    way = (mca, "plm_rsh_args" if is_version_4 else "plm_ssh_args", " ".join(ssh)) if ssh else ()
    return (*alone, *mapping, *where, *hosts, *variables, *way)


def _hydra_hosts(plan: Plan) -> tuple[str, ...]:
    if plan.local:
        return ("-rmk", "user", "-launcher", "fork", "-hosts", "localhost")
    # Not -genvlist: MPICH's loses the last variable of the environment on the way to other hosts.
    return ("-rmk", "user", "-launcher", "ssh", "-hosts", _host_list(plan), "-genvall")


def _host_list(plan: Plan) -> str:
    for host in filter(_is_ipv6, plan.hosts):
        raise ConfigurationError(
            f"Host {host} is given by its IPv6 address, which of all mpiruns only Open MPI 5's can "
            "read. Give the host a name in /etc/hosts or in DNS, and use that."
        )
    return ",".join(f"{host}:{ranks}" for host, ranks in plan.hosts.items())


def _is_ipv6(host: str) -> bool:
    return ":" in host


def _openmpi_defaults(plan: Plan, as_root: bool) -> dict[str, str]:
    defaults: dict[str, str] = {}
    if plan.local:
        # Looking for interconnects costs a second at start that ranks on one host have no use
        # for.
        defaults |= OVER_TCP
    if plan.oversubscribed:
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if as_root:
        # Containers run as root; Open MPI wants it said twice.
        defaults["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        defaults["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return defaults


# "vader" is the name of shared memory that Open MPI 4 and 5 both know.
OVER_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp", "OMPI_MCA_osc": "^ucx"}
_LEVEL, _WITHOUT_INFORMATION = "TF_CPP_MIN_LOG_LEVEL", "1"
# TensorFlow's first messages of the level INFO, with a date of zeros; they precede its reading of
# the variable.
_EARLY_INFORMATION = re.compile(
    r"I0000 00:00:\d+\.\d+ +\d+ \S+:\d+\] "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
)
_FORWARDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_\w+|PYTHON\w*"
    r"|(OMP|TF|KERAS|NCCL|HVDTRAIN|XLA|CUDA|MKL|KMP|OPENBLAS|TENSORBOARD)_\w+"
)


def rank_environment(environ: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """Return the environment of every rank: ``environ``, with ``folders`` first on PATH.

    So ``python`` is the Python that runs hvdtrain, even when its environment isn't activated.
    What a rank prints must not wait in a buffer until it is killed, and a crash must say where.
    Intel MPI would bind each rank to a part of the cores, of which its agent takes a part again.
    TensorFlow's information is for those who ask for it.
    """
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "I_MPI_PIN": "0",
        _LEVEL: _WITHOUT_INFORMATION,
    }
    path = [folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if folder]
    paths = os.pathsep.join(dict.fromkeys([*map(str, folders), *path]))
    return {**defaults, **environ, "PATH": paths}


def forwarded(environ: Mapping[str, str], extra: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the variables that ranks on other hosts get, too; their values stay out of argv."""
    names = [name for name in environ if _FORWARDED.fullmatch(name)]
    return tuple(dict.fromkeys([*sorted(names), *extra]))


def network_variables(interfaces: Sequence[str], *, over_tcp: bool) -> dict[str, str]:
    """Variables that keep MPI and NCCL to some interfaces, or to TCP.

    Open MPI passes on those that begin with OMPI_ by itself. Source: what horovodrun tells mpirun
    (horovod/runner/mpi_run.py).
    """
    variables: dict[str, str] = {}
    if interfaces:
        listed = ",".join(dict.fromkeys(interfaces))
        variables |= {"OMPI_MCA_btl_tcp_if_include": listed, "NCCL_SOCKET_IFNAME": listed}
    if over_tcp:
        variables |= {**OVER_TCP, "NCCL_IB_DISABLE": "1"}
    return variables


def hides_information(environ: Mapping[str, str]) -> bool:
    """Whether ranks with ``environ`` print no messages of TensorFlow's of the level INFO."""
    level = environ.get(_LEVEL, _WITHOUT_INFORMATION)
    return level.isdecimal() and int(level) >= int(_WITHOUT_INFORMATION)


def is_information(line: str) -> bool:
    """Whether a line is information of TensorFlow's that ``TF_CPP_MIN_LOG_LEVEL`` can't hide."""
    return _EARLY_INFORMATION.match(line) is not None
