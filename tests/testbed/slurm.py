"""Slurm and munge of the test cluster."""

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
# The default socket. The hosts share /run/munge.
MUNGE_SOCKET = "munge.socket.2"
_CPUS = 4


def write_munge(folder: Path) -> None:
    """Write a key into the folder for /run/munge."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def munged_argv() -> list[str]:
    """Return the command of munge for all hosts."""
    run = Path("/run/munge")
    files = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    paths = [f"--{option}={run / name}" for option, name in files.items()]
    # munged runs as root here, because root owns the files.
    return [find_command("munged"), "--foreground", f"--socket={run / MUNGE_SOCKET}", *paths]


def write_slurm(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write /etc/slurm for the head and the hosts. It also contains Slurm's state.

    SLURM_CONF is not set, because programs may take it as a sign of a job.
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
        # Containers may not permit control groups.
        "ProctrackType=proctrack/linuxproc\n"
        "TaskPlugin=task/none\n"
        "SelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_CPU\n"
        # Use the number of CPUs below instead of the machine's.
        "SlurmdParameters=config_overrides\n"
        "MpiDefault=pmix\n"
        "ReturnToService=2\n"
        # Schedule without the delays of a real cluster.
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
    """Return the command of the controller on the head."""
    return [find_command("slurmctld"), "-D"]


def slurmd_argv() -> list[str]:
    """Return the command of slurmd on a host."""
    return [find_command("slurmd"), "-D"]
