"""Slurm of the cluster, and munge, by which its parts know each other."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from tests.testbed.requirements import find_command

__all__ = [
    "CONTROLLER_PORT",
    "MUNGE_SOCKET",
    "munged_argv",
    "slurmctld_argv",
    "slurmd_argv",
    "write_munge",
    "write_slurm",
]

CONTROLLER_PORT = 6817
# Where all that speak munge look for it. /run is the hosts' own, and /run/munge the cluster's.
MUNGE_SOCKET = "munge.socket.2"
_CPUS = 4


def write_munge(folder: Path) -> None:
    """Write a key into the folder that is to be /run/munge."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def munged_argv() -> list[str]:
    """The command that serves munge to all hosts, in the foreground."""
    run = Path("/run/munge")
    files = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    paths = [f"--{option}={run / name}" for option, name in files.items()]
    # Root, where Debian's service is user munge: the files are the cluster's, and root's.
    return [find_command("munged"), "--foreground", f"--socket={run / MUNGE_SOCKET}", *paths]


def write_slurm(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write, for the head and hosts of ``addresses``, what is to be /etc/slurm; it takes all state.

    No variable leads to it, as on most clusters: SLURM_CONF may make a program believe in a job.
    """
    nodes = [name for name in addresses if name != "head"]
    (folder / "slurm.conf").write_text(
        "ClusterName=testbed\n"
        f"SlurmctldHost=head({addresses['head']})\n"
        f"SlurmctldPort={CONTROLLER_PORT}\n"
        "SlurmUser=root\n"
        "StateSaveLocation=/etc/slurm/state\n"
        "SlurmdSpoolDir=/etc/slurm/spool.%n\n"
        "SlurmctldPidFile=/run/slurmctld.pid\n"
        "SlurmdPidFile=/run/slurmd.pid\n"
        # No control groups: a container may not let them be changed.
        "ProctrackType=proctrack/linuxproc\n"
        "TaskPlugin=task/none\n"
        "SelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_CPU\n"
        # The CPUs below, however many the machine has.
        "SlurmdParameters=config_overrides\n"
        "MpiDefault=pmix\n"
        "ReturnToService=2\n"
        # Tests are not to wait for what a real cluster can take its time over.
        "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1\n"
        "SlurmdTimeout=10\n"
        "KillWait=2\n"
        "JobRequeue=1\n"
        + "".join(
            f"NodeName={name} NodeAddr={addresses[name]} CPUs={_CPUS} RealMemory=1000\n"
            for name in nodes
        )
        + f"PartitionName=all Nodes={','.join(nodes)} Default=YES MaxTime=10:00\n"
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()


def slurmctld_argv() -> list[str]:
    """The command that controls the cluster, in the foreground of the head."""
    return [find_command("slurmctld"), "-D"]


def slurmd_argv() -> list[str]:
    """The command that runs jobs on one host, in the foreground."""
    return [find_command("slurmd"), "-D"]
