"""A job's hosts: the command-line arguments that name them, and hosts that a cluster manages."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.cluster.hosts import Host, parse_hostfile, parse_hosts
from hvdtrain.config import MANAGED_HOSTS, Settings
from hvdtrain.config.fields import argument, positive_int
from hvdtrain.errors import ConfigurationError
from hvdtrain.text import format_list, plural

if TYPE_CHECKING:
    from hvdtrain.cluster.managed_hosts import ManagedHost
    from hvdtrain.cluster.tf_config import TaskHosts

__all__ = [
    "TF_CONFIG",
    "HostWatch",
    "add_cluster_arguments",
    "add_host_arguments",
    "named_cluster",
    "named_hosts",
]

# In this variable, TensorFlow's launchers list all tasks, and which of them this process is.
TF_CONFIG = "TF_CONFIG"


def add_host_arguments(group: argparse._ActionsContainer) -> argparse._MutuallyExclusiveGroup:
    """Declare ``-np`` and, in the group that is returned, ``-H`` and ``--hostfile``."""
    group.add_argument(
        *("-np", "--num-proc"),
        type=argument(positive_int),
        metavar="N",
        help="number of ranks; default: one per slot of the hosts",
    )
    exclusive = group.add_mutually_exclusive_group()
    exclusive.add_argument(
        *("-H", "--hosts"),
        metavar="HOSTS",
        help="a:4,b:4, node[01-04]:2 or user@a:4; default: the Slurm job's, or this host",
    )
    exclusive.add_argument(
        "--hostfile",
        metavar="FILE",
        help="file with a host and its slots per line, in the format of any MPI",
    )
    return exclusive


def add_cluster_arguments(
    group: argparse._ActionsContainer, exclusive: argparse._MutuallyExclusiveGroup
) -> None:
    """Declare the options that name the tasks of a parameter-server cluster."""
    exclusive.add_argument(
        "--cluster",
        metavar="FILE",
        help='JSON file with tasks instead of -H: {"worker": ["a:2222"], "ps": ["b:2222"]}',
    )
    exclusive.add_argument(
        "--worker-hosts",
        metavar="HOSTS",
        help="hosts of workers instead of -H, such as a:2222,b:2222; ports are ignored",
    )
    group.add_argument(
        "--ps-hosts",
        metavar="HOSTS",
        help="hosts of parameter servers, with --worker-hosts; ports are ignored",
    )


def named_hosts(hosts: str | None, hostfile: str | None) -> list[Host] | None:
    """Return the hosts of ``-H`` or ``--hostfile``, or None if neither is given.

    Raises:
        ConfigurationError: If the hosts can't be read.
    """
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is None:
        return None
    return parse_hostfile(_read(hostfile, f"The hostfile {hostfile}"), hostfile)


def named_cluster(
    arguments: argparse.Namespace, settings: Settings, environ: Mapping[str, str]
) -> TaskHosts | None:
    """Return the parameter-server cluster that the arguments name, if any.

    ``TF_CONFIG`` is used if parameter servers are requested and no argument names hosts.

    Raises:
        ConfigurationError: If the cluster can't be read, or contradicts other arguments or the
            settings.
    """
    if arguments.ps_hosts is not None and arguments.worker_hosts is None:
        raise ConfigurationError("--ps-hosts requires --worker-hosts; add it.")
    names_tasks = arguments.cluster is not None or arguments.worker_hosts is not None
    names_hosts = arguments.hosts is not None or arguments.hostfile is not None
    from_environ = settings.has_servers and bool(environ.get(TF_CONFIG)) and not names_hosts
    if not names_tasks and not from_environ:
        return None
    from hvdtrain.cluster.tf_config import parse_cluster, parse_task_lists

    if arguments.cluster is not None:
        source = f"--cluster {arguments.cluster}"
        cluster = parse_cluster(_read(arguments.cluster, source), source)
    elif arguments.worker_hosts is not None:
        source = "--worker-hosts" if arguments.ps_hosts is None else "--worker-hosts, --ps-hosts"
        cluster = parse_task_lists(arguments.worker_hosts, arguments.ps_hosts)
    else:
        source = f"the variable {TF_CONFIG}"
        cluster = parse_cluster(environ[TF_CONFIG], source)
    _check_cluster(cluster, source, settings, arguments.num_proc)
    return cluster


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"{what} can't be read: {reason}.") from None


def _check_cluster(cluster: TaskHosts, source: str, settings: Settings, ranks: int | None) -> None:
    """Raise an error if the cluster contradicts the settings or the number of ranks."""
    if cluster.servers and not settings.has_servers:
        raise ConfigurationError(
            f"{source} names parameter servers, but --mode {settings.mode} uses none; give "
            "--mode async-ps or sync-ps, or remove them."
        )
    if settings.has_servers and not cluster.servers:
        raise ConfigurationError(
            f"{source} names no parameter server (ps), but --mode {settings.mode} needs at least "
            "one; add it."
        )
    if settings.ps_ranks:
        raise ConfigurationError(
            f"{source} and --ps-ranks (HVDTRAIN_PS_RANKS) both place parameter servers; give only "
            "one of them."
        )
    workers, servers = len(cluster.workers), len(cluster.servers)
    if ranks not in (None, workers + servers):
        raise ConfigurationError(
            f"-np {ranks} is not the number of tasks in {source}, {workers + servers} "
            f"({plural(workers, 'worker')} and {plural(servers, 'parameter server')}); omit -np."
        )


logger = logging.getLogger(__package__)

READ_INTERVAL_S = 0.5
STEP_S = 0.2
# The removal of a host may be reported this long after its ranks have ended.
REPORT_DELAY_S = 5.0
# How long a job that could start on fewer hosts waits for all of them. Waiting is worthwhile,
# because another restart would take longer.
PATIENCE_S = 15.0
# How long a job waits without a message, because new hosts may not be reported yet.
QUIET_S = 3.0
# The interval of messages about missing hosts that don't change.
MESSAGE_INTERVAL_S = 60.0


class HostWatch:
    """Watches the hosts that a cluster manages, in the file that ``MANAGED_HOSTS`` names.

    Without this variable, the hosts never change. If ``may_grow`` is true, the job uses more than
    ``ranks`` ranks when its hosts have more than ``slots`` slots in total. To add ranks, a running
    job restarts after its next checkpoint.
    """

    def __init__(
        self, environ: Mapping[str, str], *, ranks: int, slots: int, may_grow: bool
    ) -> None:
        path = environ.get(MANAGED_HOSTS, "")
        self._path = Path(path) if path else None
        self._ranks, self._slots = ranks, slots
        self._may_grow = may_grow
        self._hosts: tuple[ManagedHost, ...] = ()
        self._at_start: tuple[ManagedHost, ...] = ()
        self._used: Collection[str] = ()
        self._running = 0
        self._due_at = 0.0
        self._more_since: float | None = None

    @property
    def is_managed(self) -> bool:
        """Whether a cluster manages the hosts."""
        return self._path is not None

    def begin(self, used: Collection[str], ranks: int) -> None:
        """Record that an attempt starts ``ranks`` ranks on the hosts in ``used``."""
        self._refresh()
        self._at_start, self._used, self._running = self._hosts, used, ranks
        self._more_since = None

    def reason_to_restart(self, now: float, saved_at: float | None) -> str:
        """Return the reason to save a checkpoint and restart all ranks; "" if there is none."""
        if self._path is None or now < self._due_at:
            return ""
        from hvdtrain.cluster.managed_hosts import leaving_hosts

        self._due_at = now + READ_INTERVAL_S
        self._refresh()
        if leaving := leaving_hosts(self._hosts, self._used):
            return f"{_describe(leaving)} will be removed; saving a checkpoint to restart"
        more = self._room() - self._running if self._may_grow else 0
        if more <= 0:
            self._more_since = None
        elif self._more_since is None:
            self._more_since = now
            logger.info(f"{plural(more, 'more rank')} can join after the next checkpoint")
        elif saved_at is not None and saved_at > self._more_since:
            return f"checkpoint written; restarting with {plural(more, 'more rank')}"
        return ""

    def removed(self) -> Mapping[str, str]:
        """Wait up to ``REPORT_DELAY_S``, and return removed hosts of the attempt with reasons."""
        from hvdtrain.cluster.managed_hosts import lost_hosts

        until = time.monotonic() + REPORT_DELAY_S
        while self._path is not None:
            self._refresh()
            if hosts := lost_hosts(self._at_start, self._hosts, self._used):
                return hosts
            if time.monotonic() > until:
                break
            time.sleep(STEP_S)
        return {}

    def await_hosts(self, least: int, received: Sequence[int]) -> tuple[list[Host], int]:
        """Wait until ranks can start, and return the available hosts and the number of ranks.

        If the job may grow, it starts without the missing hosts after ``PATIENCE_S`` seconds,
        provided that there is room for ``least`` ranks or more. Other jobs wait for all hosts
        indefinitely. A received signal ends the wait.
        """
        message, message_at = "", time.monotonic() + QUIET_S
        patient_until = time.monotonic() + PATIENCE_S
        while True:
            self._refresh()
            missing = {host.name: host.why for host in self._hosts if host.state != "there"}
            hosts = [Host(name=h.name, slots=h.slots) for h in self._hosts if h.name not in missing]
            is_patient = not self._may_grow or time.monotonic() < patient_until
            enough = not is_patient and self._room() >= least
            if received or (hosts and (enough or not missing)):
                return hosts, self._room()
            text = f"waiting for {_describe(missing)}"
            if time.monotonic() > message_at or (message and text != message):
                logger.warning(text)
                message, message_at = text, time.monotonic() + MESSAGE_INTERVAL_S
            time.sleep(STEP_S)

    def _room(self) -> int:
        from hvdtrain.cluster.managed_hosts import target_ranks

        room = target_ranks(self._hosts, ranks=self._ranks, slots=self._slots)
        return room if self._may_grow else min(room, self._ranks)

    def _refresh(self) -> None:
        if self._path is not None:
            from hvdtrain.cluster.managed_hosts import parse_managed_hosts

            # If the file can't be read now, the hosts stay as they were.
            with contextlib.suppress(OSError, ConfigurationError):
                self._hosts = parse_managed_hosts(self._path.read_text())


def _describe(hosts: Mapping[str, str]) -> str:
    """Format a list of hosts, each with the reason that ``hosts`` gives for it."""
    return format_list((f"{name} ({why})" if why else name for name, why in hosts.items()), "hosts")
