"""Waits until a job that was submitted has its slots."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.cluster.cores import available_cores
from hvdtrain.cluster.hosts import Host
from hvdtrain.jobs.slots import Turn
from hvdtrain.jobs.state import host_identity
from hvdtrain.remote.own_addresses import is_this_host

__all__ = ["await_turn", "gpu_variables", "slots_of"]

POLL_S = 0.25
QUEUE = ".queue"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def slots_of(hosts: Sequence[Host], gpus: int) -> dict[str, int]:
    """Return how many ranks may run at a time on each host.

    As many as were named; on this host one for each GPU, or where it has none each core.
    """
    here = gpus or available_cores()
    return {host.name: here if is_this_host(host.name) else host.slots for host in hosts}


def await_turn(
    job: Path, wanted: Mapping[str, int], slots: Mapping[str, int], received: Sequence[int]
) -> Mapping[str, Sequence[int]] | None:
    """Wait until the slots that a job needs are free, and take them until this process ends.

    Args:
        job: The job's folder; jobs beside it share the slots.
        wanted: How many ranks it has on each host.
        slots: How many may run there at a time.
        received: Signals as they arrive.

    Returns:
        The numbers of the slots that it has on each host; None where a signal came first.

    Raises:
        JobError: The queue can't be used.
    """
    keys = {host: _key(host) for host in wanted}
    in_all: Counter[str] = Counter()
    for host, count in wanted.items():
        in_all[keys[host]] += count
    turn = Turn(
        job.parent / QUEUE,
        job.name,
        wanted=in_all,
        slots={keys[host]: slots[host] for host in wanted},
    )
    while not received and not turn.has_come():
        time.sleep(POLL_S)
    if received:
        turn.leave()
        return None
    return {host: turn.held(keys[host]) for host in wanted}


def _key(host: str) -> str:
    """One name for a host, whatever it is called, that a file can have.

    Jobs of other machines that use the same folder call those "localhost" as well.
    """
    return host_identity() if is_this_host(host) else host.lower().replace("/", "_")


def gpu_variables(
    environ: Mapping[str, str], taken: Mapping[str, Sequence[int]], gpus: int
) -> dict[str, str]:
    """Return variables that show a job only the GPUs of its slots on this host; empty without such.

    On other hosts ranks see what their hosts give them.
    """
    slots = [number for host, numbers in taken.items() if is_this_host(host) for number in numbers]
    if not gpus or not slots:
        return {}
    named = [d for d in environ.get(_VISIBLE, "").split(",") if d not in ("", "-1")]
    devices = named or [str(number) for number in range(gpus)]
    return {_VISIBLE: ",".join(devices[number] for number in slots)}
