"""Arguments of the command line that name hosts and tasks, and the hosts that they name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.cluster.hosts import Host, parse_hostfile, parse_hosts
from hvdtrain.cluster.ranges import counted
from hvdtrain.cluster.tf_config import ClassicCluster, parse_cluster, parse_task_lists
from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError

__all__ = ["TF_CONFIG", "add_cluster", "add_where", "named_cluster", "named_hosts", "whole_number"]

# By which TensorFlow's own launchers tell each process of all tasks, and which one is its own.
TF_CONFIG = "TF_CONFIG"

_HOST_FLAGS = {"-H": "hosts", "--hostfile": "hostfile"}
_TASK_FLAGS = {"--cluster": "cluster", "--worker-hosts": "worker_hosts", "--ps-hosts": "ps_hosts"}


def add_where(group: argparse._ActionsContainer) -> None:
    """Declare ``-np``, ``-H`` and ``--hostfile``."""
    group.add_argument(
        "-np", "--num-proc", type=whole_number, metavar="N", help="ranks; default: all slots"
    )
    group.add_argument(
        "-H",
        "--hosts",
        metavar="HOSTS",
        help="a:4,b:4, node[01-04]:2 or user@a:4; default: Slurm's, or this one",
    )
    group.add_argument(
        "--hostfile", metavar="FILE", help="hosts and slots, a line each, in any dialect"
    )


def add_cluster(group: argparse._ActionsContainer) -> None:
    """Declare what names the tasks of a classic cluster."""
    group.add_argument(
        "--cluster",
        metavar="FILE",
        help='tasks in JSON instead of -H: {"worker": ["a:2222"], "ps": ["b:2222"]}',
    )
    group.add_argument(
        "--worker-hosts",
        metavar="HOSTS",
        help="the same in lists: a:2222,b:2222; ports don't count",
    )
    group.add_argument("--ps-hosts", metavar="HOSTS", help="c:2222, beside --worker-hosts")


def named_hosts(hosts: str | None, hostfile: str | None) -> list[Host] | None:
    """The hosts that ``-H`` or ``--hostfile`` name; None where neither is given.

    Raises:
        ConfigurationError: Both are given, or they can't be read.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigurationError("-H and --hostfile both name the hosts; give one of them.")
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is None:
        return None
    return parse_hostfile(_text(hostfile, f"The hostfile {hostfile}"), hostfile)


def named_cluster(
    arguments: argparse.Namespace, settings: Settings, environ: Mapping[str, str]
) -> ClassicCluster | None:
    """The classic cluster that the arguments name; None where there is none.

    ``TF_CONFIG`` names one where parameter servers are asked for and no argument names hosts.

    Raises:
        ConfigurationError: It can't be read, or contradicts other arguments or the settings.
    """
    hosts = _given(arguments, _HOST_FLAGS)
    tasks = _given(arguments, _TASK_FLAGS)
    if tasks and hosts:
        raise ConfigurationError(f"{tasks[0]} and {hosts[0]} both name hosts; give one of them.")
    if "--cluster" in tasks[:1] and len(tasks) > 1:
        raise ConfigurationError(f"--cluster and {tasks[1]} both name tasks; give one of them.")
    if tasks == ["--ps-hosts"]:
        raise ConfigurationError("--ps-hosts names no workers; give --worker-hosts beside it.")
    if arguments.cluster is not None:
        source = f"--cluster {arguments.cluster}"
        cluster = parse_cluster(_text(arguments.cluster, source), source)
    elif tasks:
        source = " and ".join(tasks)
        cluster = parse_task_lists(arguments.worker_hosts, arguments.ps_hosts)
    elif settings.has_servers and not hosts and environ.get(TF_CONFIG):
        source = f"the variable {TF_CONFIG}"
        cluster = parse_cluster(environ[TF_CONFIG], source)
    else:
        return None
    _check_cluster(cluster, source, settings, arguments.num_proc)
    return cluster


def _given(arguments: argparse.Namespace, flags: Mapping[str, str]) -> list[str]:
    return [flag for flag, name in flags.items() if getattr(arguments, name) is not None]


def _text(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(f"{what} can't be read: {why}.") from None


def _check_cluster(
    cluster: ClassicCluster, source: str, settings: Settings, ranks: int | None
) -> None:
    """Raise for what the user says otherwise elsewhere."""
    if cluster.servers and not settings.has_servers:
        raise ConfigurationError(
            f"{source}: parameter servers are named, but --mode {settings.mode} has none; give "
            "--mode async-ps or sync-ps, or leave them out."
        )
    if settings.has_servers and not cluster.servers:
        raise ConfigurationError(
            f"{source}: no parameter server (ps) is named, but --mode {settings.mode} needs one or "
            "more; add them."
        )
    if settings.ps_ranks:
        raise ConfigurationError(
            f"{source} and --ps-ranks (HVDTRAIN_PS_RANKS) both say where parameter servers are; "
            "give one of them."
        )
    workers, servers = len(cluster.workers), len(cluster.servers)
    if ranks not in (None, workers + servers):
        raise ConfigurationError(
            f"-np {ranks} is not the number of tasks in {source}: "
            f"{counted(workers, 'worker')} and {counted(servers, 'parameter server')} are "
            f"{workers + servers}. Leave -np out."
        )


def whole_number(text: str) -> int:
    """Read a count on the command line.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number above 0.
    """
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return count
