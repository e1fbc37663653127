"""Placement of ranks: the host, GPUs and cores of each rank."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
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
    "format_places",
    "max_ranks",
    "place",
    "select_part",
    "share_of_cores",
    "visible_entries",
]

Role = Literal["chief", "worker", "ps"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one rank."""

    rank: int  # index of the process in the job
    host: str  # name of the rank's host, as the user wrote it
    local_rank: int  # index of the process on its host
    local_size: int  # number of the job's processes on this host
    node_rank: int  # index of this host among the hosts with ranks
    role: Role  # ``"chief"`` for rank 0, ``"ps"`` for a parameter server, otherwise ``"worker"``
    # indices of the rank's GPUs on the host; empty for parameter servers, and if the host's GPUs
    # are unknown
    gpus: tuple[int, ...]
    # the rank's first and last core, both inclusive; None if the host's cores are unknown
    cores: tuple[int, int] | None


def place(
    hosts: Sequence[Host],
    ranks: int | None,
    *,
    servers: Collection[int] = (),
    oversubscribe: bool = False,
    share_gpus: bool = False,
    gpus_per_rank: int = 1,
    cores: Mapping[str, int] | None = None,
    gpus: Mapping[str, int] | None = None,
) -> list[Place]:
    """Place all ranks. The slots of the first host are filled first.

    Args:
        hosts: The hosts, in the order in which they get ranks.
        ranks: Number of ranks. None means one rank per slot.
        servers: Ranks of the parameter servers, which get no GPUs.
        oversubscribe: Allow more ranks than slots. The additional ranks are dealt to the hosts one
            at a time, up to the ``max_slots`` of each host.
        share_gpus: Allow more ranks than GPUs on a host.
        gpus_per_rank: Number of GPUs per rank.
        cores: Number of cores per host, if known. The shares of a host's ranks differ by at most
            one core. If a host has more ranks than cores, several ranks get the same core.
        gpus: Number of GPUs per host, if known.

    Returns:
        The place of each rank, in the order of the ranks. The ranks of a host are consecutive.

    Raises:
        ConfigurationError: If there are too few slots or GPUs.
    """
    hosts = merge_hosts(hosts)
    counts = _ranks_per_host(hosts, ranks, oversubscribe=oversubscribe)
    used = [(host.name, count) for host, count in zip(hosts, counts) if count > 0]
    cores, gpus = cores or {}, gpus or {}
    places: list[Place] = []
    for node_rank, (name, count) in enumerate(used):
        gpu_turns = itertools.count()
        for local_rank in range(count):
            rank = len(places)
            role: Role = "ps" if rank in servers else "worker" if rank else "chief"
            rank_gpus: tuple[int, ...] = ()
            if role != "ps":
                rank_gpus = _gpu_indices(next(gpu_turns), gpus_per_rank, gpus.get(name, 0))
            places.append(
                Place(
                    rank=rank,
                    host=name,
                    local_rank=local_rank,
                    local_size=count,
                    node_rank=node_rank,
                    role=role,
                    gpus=rank_gpus,
                    cores=share_of_cores(local_rank, count, cores.get(name, 0)),
                )
            )
    _check_gpus(places, gpus, gpus_per_rank, share=share_gpus)
    return places


def format_places(places: Iterable[Place]) -> str:
    """Format places as a table with one line per rank. ``-`` stands for unknown values."""
    rows = [
        (
            *(str(entry.rank), entry.host, str(entry.local_rank), entry.role),
            ",".join(map(str, entry.gpus)) or "-",
            "-" if entry.cores is None else "-".join(map(str, dict.fromkeys(entry.cores))),
        )
        for entry in places
    ]
    return format_table(("rank", "host", "local rank", "role", "GPU", "cores"), rows, left=(1, 3))


def share_of_cores(local_rank: int, local_size: int, cores: int) -> tuple[int, int] | None:
    """Return a rank's first and last core, both inclusive; None if ``cores`` is 0."""
    if cores < 1:
        return None
    if local_size > cores:
        return local_rank % cores, local_rank % cores
    return cores * local_rank // local_size, cores * (local_rank + 1) // local_size - 1


def max_ranks(hosts: Sequence[Host], *, oversubscribe: bool) -> int | None:
    """Return the maximum number of ranks on these hosts; None if unlimited."""
    if not oversubscribe:
        return sum(host.slots for host in hosts)
    limits = [host.max_slots for host in hosts if host.max_slots is not None]
    return sum(limits) if len(limits) == len(hosts) else None


def _ranks_per_host(hosts: Sequence[Host], ranks: int | None, *, oversubscribe: bool) -> list[int]:
    if not hosts:
        raise ConfigurationError("The list of hosts is empty; name at least one with -H.")
    slots = sum(host.slots for host in hosts)
    left = slots if ranks is None else ranks
    if left < 1:
        raise ConfigurationError(f"The number of ranks must be at least 1, got {left}.")
    if left > slots:
        _check_slots(hosts, left, slots, oversubscribe=oversubscribe)
    counts = []
    for host in hosts:
        counts.append(min(host.slots, left))
        left -= counts[-1]
    while left > 0:
        for index, host in enumerate(hosts):
            if left > 0 and (host.max_slots is None or counts[index] < host.max_slots):
                counts[index] += 1
                left -= 1
    return counts


def _check_slots(hosts: Sequence[Host], ranks: int, slots: int, *, oversubscribe: bool) -> None:
    """Raise an error if ranks exceed the slots, or ``max_slots`` if ``oversubscribe``."""
    limit = max_ranks(hosts, oversubscribe=True)
    fits = limit is None or ranks <= limit
    if not oversubscribe:
        details = (f"{host.name} has {plural(host.slots, 'slot')}" for host in hosts)
        raise ConfigurationError(
            f"{ranks} ranks don't fit: {format_list(details, 'hosts')}, {slots} in total. Start "
            f"{slots} or name more hosts" + (", or pass --oversubscribe." if fits else ".")
        )
    if not fits:
        details = (f"{host.name} takes at most {host.max_slots}" for host in hosts)
        raise ConfigurationError(
            f"{ranks} ranks don't fit, even with --oversubscribe: {format_list(details, 'hosts')}, "
            f"{limit} in total. Start {limit}, name more hosts, or raise max_slots."
        )


def _gpu_indices(turn: int, gpus_per_rank: int, gpus: int) -> tuple[int, ...]:
    """Return the GPUs of the rank with the index ``turn`` among the host's ranks with GPUs."""
    first = turn * gpus_per_rank
    return tuple(sorted({index % gpus for index in range(first, first + gpus_per_rank) if gpus}))


def _check_gpus(
    places: Sequence[Place], gpus: Mapping[str, int], gpus_per_rank: int, *, share: bool
) -> None:
    training = Counter(entry.host for entry in places if entry.role != "ps")
    noun = "ranks" if training.total() == len(places) else "workers"
    short = [
        f"{name} has {plural(gpus[name], 'GPU')} for {count} {noun}"
        for name, count in training.items()
        if 0 < gpus.get(name, 0) < gpus_per_rank * (1 if share else count)
    ]
    if not short:
        return
    problem = f"There are more {noun} than GPUs"
    if gpus_per_rank > 1:
        problem = f"There are too few GPUs for {gpus_per_rank} per rank (--devices-per-rank)"
    remedy = "" if share else "; or let them share GPUs with --share-gpus"
    raise ConfigurationError(
        f"{problem}: {format_list(short, 'hosts')}. Start fewer {noun}{remedy}; or compute on the "
        "CPU with CUDA_VISIBLE_DEVICES=-1."
    )


def visible_entries(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` lists; None if it is not set.

    Each entry is a number, a UUID or the beginning of a UUID. As in CUDA, an invalid entry such as
    -1 ends the list.
    """
    if (value := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return None
    entries: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(entry)
    return entries


def select_part(environ: MutableMapping[str, str], local_rank: int) -> None:
    """Reduce a list of parts of GPUs (MIG) in ``CUDA_VISIBLE_DEVICES`` to the part of one rank.

    CUDA shows only the first part of a list.
    """
    entries = visible_entries(environ) or []
    if len(entries) > 1 and entries[0].startswith("MIG-"):
        environ["CUDA_VISIBLE_DEVICES"] = entries[local_rank % len(entries)]


def available_cores() -> int:
    """Return the number of cores that this process may use, which a container often limits."""
    return len(core_numbers())


def core_numbers() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
