"""Roles of ranks: workers train, and parameter servers hold the variables for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.placement import Place, place
from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError
from hvdtrain.text import format_list, plural

if TYPE_CHECKING:
    from hvdtrain.cluster.tf_config import ClassicCluster

__all__ = ["Roles", "assign_roles", "remaining"]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The ranks that train, and those that hold the variables.

    Attributes:
        workers: By rank; worker 0 is the chief, and is rank 0.
        servers: The parameter servers by rank; empty where ranks average among themselves.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]


def assign_roles(size: int, settings: Settings) -> Roles:
    """Give each of ``size`` ranks its role, the same on every rank and in the launcher.

    Raises:
        ConfigurationError: The ranks don't suffice for the settings; the message has the numbers.
    """
    if not settings.has_servers:
        return Roles(workers=tuple(range(size)), servers=())
    if settings.ps_ranks:
        _check_ranks(settings.ps_ranks, size)
    elif settings.num_ps >= size:
        fewer = ", or take fewer servers" if settings.num_ps > 1 else ""
        raise ConfigurationError(
            f"{plural(size, 'rank')} with {plural(settings.num_ps, 'parameter server')} "
            f"(--num-ps, HVDTRAIN_NUM_PS) leave{'s' if size == 1 else ''} no worker; expected at "
            f"least one worker and one server: start {settings.num_ps + 1} ranks or more{fewer}."
        )
    servers = settings.ps_ranks or tuple(range(size - settings.num_ps, size))
    workers = tuple(rank for rank in range(size) if rank not in servers)
    if settings.mode == "sync-ps" and settings.backup_workers >= len(workers):
        raise ConfigurationError(
            f"{plural(settings.backup_workers, 'backup worker')} (--backup-workers, "
            f"HVDTRAIN_BACKUP_WORKERS) leave no gradient to step with: {plural(size, 'rank')} "
            f"less {plural(len(servers), 'parameter server')} are "
            f"{plural(len(workers), 'worker')}; expected at most {len(workers) - 1}. Start more "
            "ranks, or do without fewer workers."
        )
    return Roles(workers=workers, servers=servers)


def remaining(
    before: Sequence[Place], hosts: Sequence[Host], ranks: int | None, *, oversubscribe: bool
) -> ClassicCluster:
    """Decide the roles on each host after hosts were lost and fewer ranks are left.

    Servers that were put on certain hosts stay there, though their ranks have other numbers then;
    all other ranks are workers.

    Args:
        before: The places until then.
        hosts: Those that are left, as they were spelled.
        ranks: How many ranks there are to be; None for as many as fit.

    Raises:
        ConfigurationError: All workers are lost, or all servers.
    """
    from hvdtrain.cluster.tf_config import ClassicCluster

    counts = Counter(entry.host for entry in place(hosts, ranks, oversubscribe=oversubscribe))
    served = Counter(entry.host for entry in before if entry.role == "ps")
    serving = Counter({host: min(count, served[host]) for host, count in counts.items()})
    left = ClassicCluster(
        workers=tuple((counts - serving).elements()), servers=tuple(serving.elements())
    )
    if not left.workers or not left.servers:
        lost, there = ("workers", "servers") if left.servers else ("servers", "workers")
        were = (entry.host for entry in before if (entry.role == "ps") == (lost == "servers"))
        raise ConfigurationError(
            f"all {lost} are lost with {format_list(dict.fromkeys(were), 'hosts')}, and what is "
            f"left has only {there}; expected at least one worker and one parameter server"
        )
    return left


def _check_ranks(servers: Sequence[int], size: int) -> None:
    ending = "" if len(servers) == 1 else "s"
    named = (
        f"Parameter servers are to be on rank{ending} {format_list(servers, 'ranks')} (--ps-ranks, "
        "HVDTRAIN_PS_RANKS)"
    )
    if servers[-1] >= size:
        raise ConfigurationError(
            f"{named}, but the last of {plural(size, 'rank')} is rank {size - 1}; expected ranks "
            f"that there are, other than 0: start {servers[-1] + 1} ranks or more, or name others."
        )
    if 0 in servers:
        raise ConfigurationError(
            f"{named}, but rank 0 is the chief, which is worker 0 and trains; expected other ranks."
        )
