"""By which names and addresses other hosts know this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence

__all__ = ["is_this_host", "own_addresses"]

# Addresses of one host that are tried; more would be the same interfaces again.
_TRIED = 2


def is_this_host(name: str) -> bool:
    """Whether a host is called by a name of the one that this process runs on."""
    own_names = ("localhost", "127.0.0.1", "::1", socket.gethostname().lower())
    return name.lower() in own_names


def own_addresses(hosts: Sequence[str]) -> list[str]:
    """This host's addresses as its routes to ``hosts`` say, and its name; alone, the local one."""
    if not hosts:
        return ["127.0.0.1"]
    found = []
    for host in hosts:
        try:
            known = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            for family, kind, protocol, _, address in known[:_TRIED]:
                # Connecting a datagram socket sends nothing; it asks the routing table.
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
        except OSError:
            continue
    return list(dict.fromkeys([*found, socket.gethostname()]))
