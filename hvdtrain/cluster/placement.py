"""Placement of ranks: from hosts and a number of ranks to a place for each rank."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.cluster.hosts import Host, merge_hosts
from hvdtrain.errors import ConfigurationError
from hvdtrain.text import format_list, format_table, plural

__all__ = [
    "Place",
    "Role",
    "available_cores",
    "core_numbers",
    "most_ranks",
    "place",
    "share_of_cores",
    "table",
]

Role = Literal["chief", "worker", "ps"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one rank: the host, GPUs and cores that it is to run on.

    Attributes:
        rank: Number of the process in the job, from 0.
        host: Name of its host, as it was spelled.
        local_rank: Number of the process on its host, from 0.
        local_size: Processes on its host.
        node_rank: Index of its host among the hosts that got ranks.
        role: ``"ps"`` for a parameter server; else ``"chief"`` for rank 0, ``"worker"`` for the
            others.
        gpus: Indices of its GPUs on the host; empty where the host isn't known to have any, and
            for parameter servers.
        cores: First and last core, both included, of its share of the host; ``None`` where the
            number of cores isn't known.
    """

    rank: int
    host: str
    local_rank: int
    local_size: int
    node_rank: int
    role: Role
    gpus: tuple[int, ...]
    cores: tuple[int, int] | None


def place(
    hosts: Sequence[Host],
    ranks: int | None,
    *,
    servers: Collection[int] = (),
    oversubscribe: bool = False,
    share_gpus: bool = False,
    gpus_each: int = 1,
    cores: Mapping[str, int] | None = None,
    gpus: Mapping[str, int] | None = None,
) -> list[Place]:
    """Give every rank a place: the first host's slots are filled first, then the second's.

    Args:
        hosts: Where ranks can run, in this order.
        ranks: How many ranks; ``None`` for as many as there are slots.
        servers: Those ranks that are parameter servers. They compute nothing that a GPU is for.
        oversubscribe: Whether more ranks than slots may run. The surplus is dealt out in turns,
            one rank a host, up to each host's ``max_slots``.
        share_gpus: Whether more ranks than GPUs may run on a host; they take the GPUs in turns.
        gpus_each: How many GPUs a rank takes.
        cores: Number of cores by host name, where known. Ranks get equal shares, differing by
            at most one core; where there are more ranks than cores, they take them in turns.
        gpus: Number of GPUs by host name, where known.

    Returns:
        The places by rank. The ranks of a host follow each other; hosts without ranks are absent.

    Raises:
        ConfigurationError: The ranks don't fit on the hosts or on their GPUs.
    """
    hosts = merge_hosts(hosts)
    counts = _ranks_per_host(hosts, ranks, oversubscribe=oversubscribe)
    used = [(host.name, count) for host, count in zip(hosts, counts) if count > 0]
    cores = _by_lower_name(cores)
    gpus = _by_lower_name(gpus)
    places: list[Place] = []
    for node_rank, (name, count) in enumerate(used):
        turns = itertools.count()
        for local_rank in range(count):
            rank = len(places)
            role: Role = "ps" if rank in servers else "worker" if rank else "chief"
            places.append(
                Place(
                    rank=rank,
                    host=name,
                    local_rank=local_rank,
                    local_size=count,
                    node_rank=node_rank,
                    role=role,
                    gpus=()
                    if role == "ps"
                    else _gpus(next(turns), gpus_each, gpus.get(name.lower(), 0)),
                    cores=share_of_cores(local_rank, count, cores.get(name.lower(), 0)),
                )
            )
    _check_gpus(places, gpus, gpus_each, share=share_gpus)
    return places


def table(places: Iterable[Place]) -> str:
    """The places as text, one line a rank under a line of titles; ``-`` where nothing is known."""
    rows = [
        (
            *(str(entry.rank), entry.host, str(entry.local_rank), entry.role),
            *(",".join(map(str, entry.gpus)) or "-", _span(entry.cores)),
        )
        for entry in places
    ]
    return format_table(("rank", "host", "local rank", "role", "GPU", "cores"), rows, left=(1, 3))


def share_of_cores(local_rank: int, local_size: int, cores: int) -> tuple[int, int] | None:
    """First and last core, both included, of one rank of a host; None for unknown cores."""
    if cores < 1:
        return None
    if local_size > cores:
        return local_rank % cores, local_rank % cores
    first, after = (cores * index // local_size for index in (local_rank, local_rank + 1))
    return first, after - 1


def most_ranks(hosts: Sequence[Host], *, oversubscribe: bool) -> int | None:
    """Returns how many ranks the hosts take at most; None for any number."""
    if not oversubscribe:
        return sum(host.slots for host in hosts)
    limits = [host.max_slots for host in hosts if host.max_slots is not None]
    return sum(limits) if len(limits) == len(hosts) else None


def _ranks_per_host(hosts: Sequence[Host], ranks: int | None, *, oversubscribe: bool) -> list[int]:
    if not hosts:
        raise ConfigurationError("No host to run on; expected at least one. Name it with -H.")
    slots = sum(host.slots for host in hosts)
    ranks = slots if ranks is None else ranks
    if ranks < 1:
        raise ConfigurationError(f"{ranks} ranks can't be placed; ask for 1 or more.")
    if ranks > slots:
        _check_room(hosts, ranks, slots, oversubscribe=oversubscribe)
    counts = []
    left = ranks
    for host in hosts:
        counts.append(min(host.slots, left))
        left -= counts[-1]
    while left > 0:
        for index, host in enumerate(hosts):
            if left > 0 and (host.max_slots is None or counts[index] < host.max_slots):
                counts[index] += 1
                left -= 1
    return counts


def _check_room(hosts: Sequence[Host], ranks: int, slots: int, *, oversubscribe: bool) -> None:
    """Raise unless oversubscription is asked for and has room for ``ranks``, more than slots."""
    most = most_ranks(hosts, oversubscribe=True)
    fits = most is None or ranks <= most
    if not oversubscribe:
        has = format_list(
            (f"{host.name} has {plural(host.slots, 'slot')}" for host in hosts), "hosts"
        )
        raise ConfigurationError(
            f"{ranks} ranks don't fit: {has}, {slots} in all. Ask for {slots}, name more hosts"
            + (", or pass --oversubscribe." if fits else ".")
        )
    if not fits:
        takes = format_list(
            (f"{host.name} takes at most {host.max_slots}" for host in hosts), "hosts"
        )
        raise ConfigurationError(
            f"{ranks} ranks don't fit, even with --oversubscribe: {takes}, {most} in all. Ask for "
            f"{most}, name more hosts, or raise their max_slots."
        )


def _check_gpus(
    places: Sequence[Place], gpus: Mapping[str, int], each: int, *, share: bool
) -> None:
    training = Counter(entry.host for entry in places if entry.role != "ps")
    what = "ranks" if training.total() == len(places) else "workers"
    short = [
        f"{name} has {plural(gpus[name.lower()], 'GPU')} for {count} {what}"
        for name, count in training.items()
        if 0 < gpus.get(name.lower(), 0) < (each if share else count * each)
    ]
    if short and each > 1:
        raise ConfigurationError(
            f"There are too few GPUs for {each} a rank (--devices-per-rank): "
            f"{format_list(short, 'hosts')}. Start fewer ranks or ask for fewer devices"
            + ("" if share else "; or let ranks share, with --share-gpus")
            + "; or compute on the CPU, with CUDA_VISIBLE_DEVICES=-1."
        )
    if short:
        raise ConfigurationError(
            f"There are more {what} than GPUs: {format_list(short, 'hosts')}. Start one a GPU; or "
            "let them share, with --share-gpus; or compute on the CPU, with "
            "CUDA_VISIBLE_DEVICES=-1."
        )


def _gpus(turn: int, each: int, gpus: int) -> tuple[int, ...]:
    """Return the GPUs of the rank whose turn it is, out of ``gpus`` on its host."""
    first = turn * each
    return tuple(sorted({number % gpus for number in range(first, first + each)} if gpus else ()))


def _by_lower_name(numbers: Mapping[str, int] | None) -> dict[str, int]:
    return {name.lower(): number for name, number in (numbers or {}).items()}


def _span(cores: tuple[int, int] | None) -> str:
    if cores is None:
        return "-"
    first, last = cores
    return str(first) if first == last else f"{first}-{last}"


def available_cores() -> int:
    """Cores that this process may run on: fewer than the machine has in many containers."""
    return len(core_numbers())


def core_numbers() -> set[int]:
    """Return the numbers of these cores."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
