"""Hosts that somebody else gives to a job and takes away again, as Kubernetes does with pods.

Whoever knows of them keeps a file, which ``config.MANAGED_HOSTS`` names to ``hvdtrain run``: how
each host is, the ones that are to come among them. What follows from that is decided here; pure
functions.
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
    "going",
    "managed_hosts_text",
    "parse_managed_hosts",
    "ranks_for",
    "taken_away",
]

_TAKEN_OUT = "it is taken out of the job"

HostState = Literal[
    "there",  # ranks can be started on it
    "missing",  # it is to come, or to come back
    "going",  # it ends soon; until then its ranks may save what they have
]


@dataclass(frozen=True, kw_only=True)
class ManagedHost:
    """A host that a job has, or is to have.

    Attributes:
        name: As ranks are started on it.
        slots: Ranks that it takes.
        state: How it is.
        generation: Another word where it has come anew under the same name.
        why: Why it is not there, in the words of who gives it; empty for not known.
    """

    name: str
    slots: int
    state: HostState
    generation: str = ""
    why: str = ""


def managed_hosts_text(hosts: Iterable[ManagedHost]) -> str:
    """Write what ``parse_managed_hosts`` reads."""
    return json.dumps([asdict(host) for host in hosts], indent=1) + "\n"


def parse_managed_hosts(text: str) -> tuple[ManagedHost, ...]:
    """Read the hosts, in the order in which they get ranks.

    Raises:
        ConfigurationError: It is something else.
    """
    try:
        hosts = tuple(ManagedHost(**one) for one in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{MANAGED_HOSTS} names no list of hosts: {error}") from None
    for host in hosts:
        if host.state not in get_args(HostState) or host.slots < 1:
            raise ConfigurationError(f"{MANAGED_HOSTS} has {host}, which is no host.")
    return hosts


def taken_away(
    before: Sequence[ManagedHost], now: Sequence[ManagedHost], used: Collection[str]
) -> Mapping[str, str]:
    """The hosts that ranks ran on and that are not there any more, or anew; and why."""
    known = {host.name: host.generation for host in before}
    newest = {host.name: host for host in now}
    found = {}
    for name in (host.name for host in before if host.name in used):
        host = newest.get(name)
        if host is None:
            found[name] = _TAKEN_OUT
        elif host.generation != known[name]:
            found[name] = "it was replaced" if host.generation else "it is gone"
        elif host.state != "there":
            found[name] = host.why
    return found


def going(now: Sequence[ManagedHost], used: Collection[str]) -> Mapping[str, str]:
    """The hosts that ranks run on and that end soon, as they say or are named no more; and why."""
    named = {host.name: host for host in now}
    found = {}
    for name in used if named else ():
        host = named.get(name)
        if host is None:
            found[name] = _TAKEN_OUT
        elif host.state == "going":
            found[name] = host.why
    return found


def ranks_for(hosts: Sequence[ManagedHost], *, ranks: int, slots: int) -> int:
    """How many ranks a job is to have that may grow, on the hosts that are there.

    Args:
        hosts: The hosts.
        ranks: How many were asked for.
        slots: How many slots there were to be then. Each one more takes a rank more.
    """
    there = sum(host.slots for host in hosts if host.state == "there")
    in_all = sum(host.slots for host in hosts)
    return min(there, ranks + max(0, in_all - slots))
