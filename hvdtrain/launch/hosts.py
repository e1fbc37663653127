"""Hosts of a job: arguments that name them, and hosts that somebody else manages."""

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
from hvdtrain.errors import ConfigurationError
from hvdtrain.text import format_list, plural

if TYPE_CHECKING:
    from hvdtrain.cluster.managed_hosts import ManagedHost
    from hvdtrain.cluster.tf_config import TaskHosts

__all__ = [
    "TF_CONFIG",
    "HostWatch",
    "add_cluster",
    "add_where",
    "named_cluster",
    "named_hosts",
    "whole_number",
]

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
) -> TaskHosts | None:
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
    if not tasks and (hosts or not settings.has_servers or not environ.get(TF_CONFIG)):
        return None
    from hvdtrain.cluster.tf_config import parse_cluster, parse_task_lists

    if arguments.cluster is not None:
        source = f"--cluster {arguments.cluster}"
        cluster = parse_cluster(_text(arguments.cluster, source), source)
    elif tasks:
        source = " and ".join(tasks)
        cluster = parse_task_lists(arguments.worker_hosts, arguments.ps_hosts)
    else:
        source = f"the variable {TF_CONFIG}"
        cluster = parse_cluster(environ[TF_CONFIG], source)
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


def _check_cluster(cluster: TaskHosts, source: str, settings: Settings, ranks: int | None) -> None:
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
            f"{plural(workers, 'worker')} and {plural(servers, 'parameter server')} are "
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


logger = logging.getLogger(__package__)

LOOK_S = 0.5
STEP_S = 0.2
# From the end of a rank to when it is known that its host was taken away.
NEWS_S = 5.0
# For so long a job that could go on with fewer hosts waits for all: to start twice takes longer.
PATIENCE_S = 15.0
# For so long it waits without a word: what has just come may not be known yet.
QUIET_S = 3.0
# How often it is said for which hosts the job waits, where that does not change.
SAY_EVERY_S = 60.0


class HostWatch:
    """The hosts of one job; they are the job's own, and change nothing, where nobody manages them.

    Args:
        environ: In which ``MANAGED_HOSTS`` may name a file.
        ranks: How many ranks were asked for.
        slots: How many slots the hosts had that were named.
        may_grow: Whether more hosts than those are used, once a checkpoint is there to go on from.
    """

    def __init__(
        self, environ: Mapping[str, str], *, ranks: int, slots: int, may_grow: bool
    ) -> None:
        path = environ.get(MANAGED_HOSTS, "")
        self._path = Path(path) if path else None
        self._ranks, self._slots = ranks, slots
        self._may_grow = may_grow
        self._now: tuple[ManagedHost, ...] = ()
        self._before: tuple[ManagedHost, ...] = ()
        self._used: Collection[str] = ()
        self._running = 0
        self._due_at = 0.0
        self._more_since: float | None = None

    @property
    def is_managed(self) -> bool:
        """Whether there is somebody who tells of hosts."""
        return self._path is not None

    def begin(self, used: Collection[str], ranks: int) -> None:
        """Note that so many ranks are about to start on those hosts."""
        self._look()
        self._before, self._used, self._running = self._now, used, ranks
        self._more_since = None

    def why_leave(self, now: float, saved_at: float | None) -> str:
        """Say why all ranks are to save what they have and start again; empty for no reason.

        Args:
            now: The time.
            saved_at: When a checkpoint was written last, by the same clock; None for never.
        """
        if self._path is None or now < self._due_at:
            return ""
        from hvdtrain.cluster.managed_hosts import leaving_hosts

        self._due_at = now + LOOK_S
        self._look()
        if leaving := leaving_hosts(self._now, self._used):
            return f"{_listed(leaving)}; ranks save what they have"
        more = self._wanted() - self._running if self._may_grow else 0
        if more <= 0:
            self._more_since = None
        elif self._more_since is None:
            self._more_since = now
            logger.info(f"there is room for {plural(more, 'rank')} more from a checkpoint on")
        elif saved_at is not None and saved_at > self._more_since:
            return f"a checkpoint is written, and {plural(more, 'rank')} more can take part now"
        return ""

    def taken(self) -> Mapping[str, str]:
        """The hosts of the last start that were taken away, and why; waits a moment for news."""
        from hvdtrain.cluster.managed_hosts import lost_hosts

        until = time.monotonic() + NEWS_S
        while self._path is not None:
            self._look()
            if found := lost_hosts(self._before, self._now, self._used):
                return found
            if time.monotonic() > until:
                break
            time.sleep(STEP_S)
        return {}

    def await_hosts(self, least: int, received: Sequence[int]) -> tuple[list[Host], int]:
        """Wait until ranks can be started again; returns hosts that are there, and how many ranks.

        A job that may grow begins before long if ``least`` ranks have room, and others wait for
        all hosts, however long that takes. A signal that is received ends the waiting.
        """
        said, say_at = "", time.monotonic() + QUIET_S
        patient_until = time.monotonic() + PATIENCE_S
        while True:
            self._look()
            missing = {one.name: one.why for one in self._now if one.state != "there"}
            there = [Host(name=h.name, slots=h.slots) for h in self._now if h.name not in missing]
            is_patient = not self._may_grow or time.monotonic() < patient_until
            enough = not is_patient and self._wanted() >= least
            if received or (there and (enough or not missing)):
                return there, self._wanted()
            text = f"waits for {_listed(missing)}"
            if time.monotonic() > say_at or (said and text != said):
                logger.warning(text)
                said, say_at = text, time.monotonic() + SAY_EVERY_S
            time.sleep(STEP_S)

    def _wanted(self) -> int:
        from hvdtrain.cluster.managed_hosts import target_ranks

        found = target_ranks(self._now, ranks=self._ranks, slots=self._slots)
        return found if self._may_grow else min(found, self._ranks)

    def _look(self) -> None:
        if self._path is not None:
            from hvdtrain.cluster.managed_hosts import parse_managed_hosts

            # What can't be read now is as it was.
            with contextlib.suppress(OSError, ConfigurationError):
                self._now = parse_managed_hosts(self._path.read_text())


def _listed(hosts: Mapping[str, str]) -> str:
    """Hosts, each with what is said of it."""
    return format_list((f"{name} ({why})" if why else name for name, why in hosts.items()), "hosts")
