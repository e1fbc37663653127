"""Which hosts the command line names, and how they reach this one."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.cluster.hosts import Host, parse_hostfile, parse_hosts
from hvdtrain.errors import ConfigurationError

__all__ = ["add_where", "is_this_host", "named_hosts", "own_addresses"]

# Addresses of one host that are tried; more would be the same interfaces again.
_TRIED = 2


def add_where(group: argparse._ActionsContainer) -> None:
    """Declare ``-np``, ``-H`` and ``--hostfile``."""
    group.add_argument(
        "-np", "--num-proc", type=_rank_count, metavar="N", help="ranks; default: all slots"
    )
    group.add_argument(
        "-H",
        "--hosts",
        metavar="HOSTS",
        help="a:4,b:4 or node[01-04]:2; default: Slurm's, or this one",
    )
    group.add_argument(
        "--hostfile", metavar="FILE", help="hosts and slots, a line each, in any dialect"
    )


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
    try:
        text = Path(hostfile).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(f"The hostfile {hostfile} can't be read: {why}.") from None
    return parse_hostfile(text, hostfile)


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


def _rank_count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return count
