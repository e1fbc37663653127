"""Hosts that an external manager adds to a job and removes again, as Kubernetes does with pods.

The manager writes the state of all hosts, including hosts that it still expects, to a file. The
variable ``config.MANAGED_HOSTS`` names the file. The functions here evaluate the content.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from hvdtrain.config import MANAGED_HOSTS
from hvdtrain.errors import ConfigurationError

__all__ = [
    "HostState",
    "ManagedHost",
    "format_managed_hosts",
    "leaving_hosts",
    "lost_hosts",
    "parse_managed_hosts",
    "target_ranks",
]

_REMOVED = "it was removed from the job"

HostState = Literal[
    "there",  # ready for ranks
    "missing",  # expected, for the first time or again
    "going",  # about to end; its ranks may still save their state
]


@dataclass(frozen=True, kw_only=True)
class ManagedHost:
    """A host that a job has or expects."""

    name: str  # name or address that the launcher uses to start ranks on the host
    slots: int  # number of ranks that the host takes
    state: HostState  # whether the host can run ranks
    # ID that changes if a new host of the same name replaces this one; empty if the host is absent
    generation: str = ""
    why: str = ""  # the manager's reason for a state other than "there"; empty if unknown


def format_managed_hosts(hosts: Iterable[ManagedHost]) -> str:
    """Format a list of hosts as ``parse_managed_hosts`` expects it."""
    return json.dumps([asdict(host) for host in hosts], indent=1) + "\n"


def parse_managed_hosts(text: str) -> tuple[ManagedHost, ...]:
    """Parse the list of hosts. Hosts get ranks in the order of the list.

    Raises:
        ConfigurationError: If the text is not a valid list of hosts.
    """
    try:
        hosts = tuple(ManagedHost(**host) for host in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{MANAGED_HOSTS} has an invalid list of hosts: {error}") from None
    for host in hosts:
        if host.state not in get_args(HostState) or host.slots < 1:
            raise ConfigurationError(f"{MANAGED_HOSTS} has an invalid host: {host}")
    return hosts


def lost_hosts(
    before: Sequence[ManagedHost], now: Sequence[ManagedHost], used: Collection[str]
) -> Mapping[str, str]:
    """Return the lost or replaced hosts among the hosts in ``used``, each with the reason.

    ``before`` is an earlier list of hosts, and ``now`` is the current one.
    """
    current = {host.name: host for host in now}
    reasons = {}
    for old in before:
        if old.name not in used:
            continue
        new = current.get(old.name)
        if new is None:
            reasons[old.name] = _REMOVED
        elif new.generation != old.generation:
            reasons[old.name] = "it was replaced" if new.generation else "it is gone"
        elif new.state != "there":
            reasons[old.name] = new.why
    return reasons


def leaving_hosts(now: Sequence[ManagedHost], used: Collection[str]) -> Mapping[str, str]:
    """Return the hosts in ``used`` that were removed or are about to end, each with the reason."""
    if not now:
        return {}
    reasons = {host.name: host.why for host in now if host.state == "going"}
    known = {host.name for host in now}
    return {
        name: reasons.get(name, _REMOVED) for name in used if name in reasons or name not in known
    }


def target_ranks(hosts: Sequence[ManagedHost], *, ranks: int, slots: int) -> int:
    """Return the number of ranks for a job that may grow.

    Args:
        hosts: All hosts of the job. Only hosts that are ready can run ranks.
        ranks: Number of ranks at the start.
        slots: Number of slots at the start. Each additional slot adds a rank.
    """
    ready_slots = sum(host.slots for host in hosts if host.state == "there")
    all_slots = sum(host.slots for host in hosts)
    return min(ready_slots, ranks + max(0, all_slots - slots))
