"""Roles of ranks: workers train, and parameter servers hold the variables."""

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
    from hvdtrain.cluster.tf_config import TaskHosts

__all__ = ["Roles", "assign_roles", "remaining_tasks"]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The ranks of workers and parameter servers."""

    workers: tuple[int, ...]  # ranks of the workers; the first is rank 0, the chief
    servers: tuple[int, ...]  # ranks of the parameter servers; empty in modes without servers


def assign_roles(size: int, settings: Settings) -> Roles:
    """Assign a role to each of ``size`` ranks.

    Raises:
        ConfigurationError: If there are too few ranks for the settings.
    """
    if not settings.has_servers:
        return Roles(workers=tuple(range(size)), servers=())
    if settings.ps_ranks:
        _check_ps_ranks(settings.ps_ranks, size)
    elif settings.num_ps >= size:
        fewer = ", or use fewer servers" if settings.num_ps > 1 else ""
        raise ConfigurationError(
            f"{plural(size, 'rank')} with {plural(settings.num_ps, 'parameter server')} "
            f"(--num-ps, HVDTRAIN_NUM_PS) leave{'s' if size == 1 else ''} no worker; start at "
            f"least {settings.num_ps + 1} ranks{fewer}."
        )
    servers = settings.ps_ranks or tuple(range(size - settings.num_ps, size))
    workers = tuple(rank for rank in range(size) if rank not in servers)
    if settings.mode == "sync-ps" and settings.backup_workers >= len(workers):
        raise ConfigurationError(
            f"backup_workers (--backup-workers, HVDTRAIN_BACKUP_WORKERS) must be less than the "
            f"number of workers, {len(workers)}, got {settings.backup_workers}; start more ranks "
            "or use fewer backup workers."
        )
    return Roles(workers=workers, servers=servers)


def remaining_tasks(
    before: Sequence[Place], hosts: Sequence[Host], ranks: int | None, *, oversubscribe: bool
) -> TaskHosts:
    """Assign roles to the remaining hosts after some hosts were lost.

    Parameter servers stay on their hosts, although their ranks may change. All other ranks are
    workers.

    ``before`` contains the places of all ranks before hosts were lost. If ``ranks`` is None, there
    is one rank per slot.

    Raises:
        ConfigurationError: If all workers or all parameter servers are lost.
    """
    from hvdtrain.cluster.tf_config import TaskHosts

    counts = Counter(entry.host for entry in place(hosts, ranks, oversubscribe=oversubscribe))
    server_counts = Counter(entry.host for entry in before if entry.role == "ps")
    servers = Counter({host: min(count, server_counts[host]) for host, count in counts.items()})
    tasks = TaskHosts(
        workers=tuple((counts - servers).elements()), servers=tuple(servers.elements())
    )
    if not tasks.workers or not tasks.servers:
        lost = "workers" if tasks.servers else "servers"
        lost_hosts = (e.host for e in before if (e.role == "ps") == (lost == "servers"))
        raise ConfigurationError(
            f"all {lost} are lost with {format_list(dict.fromkeys(lost_hosts), 'hosts')}; training "
            "needs at least one worker and one parameter server"
        )
    return tasks


def _check_ps_ranks(ps_ranks: Sequence[int], size: int) -> None:
    problem = f"ps_ranks (--ps-ranks, HVDTRAIN_PS_RANKS) is {format_list(ps_ranks, 'ranks')}"
    if ps_ranks[-1] >= size:
        raise ConfigurationError(
            f"{problem}, but the last of {plural(size, 'rank')} is rank {size - 1}; start "
            f"{ps_ranks[-1] + 1} ranks or more, or name other ranks."
        )
    if 0 in ps_ranks:
        raise ConfigurationError(
            f"{problem}, but rank 0 is the chief and trains; name other ranks."
        )
