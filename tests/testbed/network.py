"""The hosts' network: a bridge on the head, and a link from it to each host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.testbed.delay_line import BACK, OUT
from tests.testbed.hosts import Host

__all__ = ["addresses", "connect", "delay_links", "hosts_text", "set_link", "shape_link"]

# The head has its own network namespace too, so addresses and names can't collide.
_SUBNET = "10.77.0"
_BRIDGE = "br0"


def addresses(hosts: Sequence[str]) -> dict[str, str]:
    """Return the addresses of the head and of each host."""
    numbers = {"head": 254, **{name: number for number, name in enumerate(hosts, start=1)}}
    return {name: f"{_SUBNET}.{number}" for name, number in numbers.items()}


def hosts_text(names: Mapping[str, str]) -> str:
    """Return the text of /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {name}" for name, address in names.items()]
    return "\n".join(lines) + "\n"


def connect(head: Host, hosts: Sequence[Host]) -> None:
    """Create links between the head and the hosts. On the head they are named after the hosts."""
    names = addresses([host.name for host in hosts])
    steps = [
        "link set lo up",
        f"link add {_BRIDGE} type bridge",
        f"addr add {names[head.name]}/24 dev {_BRIDGE}",
        f"link set {_BRIDGE} up",
    ]
    for host in hosts:
        steps += [
            f"link add {host.name} type veth peer name eth0 netns {host.keeper.pid}",
            f"link set {host.name} master {_BRIDGE} up",
        ]
    _ip(head, steps)
    for host in hosts:
        address = names[host.name]
        _ip(host, ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"])


def set_link(head: Host, name: str, state: str) -> None:
    """Set the link of the host ``name`` to ``up`` or ``down``."""
    _ip(head, [f"link set {name} {state}"])


def shape_link(head: Host, host: Host, rate: str, queue_ms: int) -> None:
    """Limit the link of a host to ``rate``, as for tc, in each direction."""
    shaper = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", f"{queue_ms}ms")
    host.do("tc", "qdisc", "replace", "dev", "eth0", *shaper)
    head.do("tc", "qdisc", "replace", "dev", host.name, *shaper)


def delay_links(head: Host, hosts: Sequence[Host]) -> None:
    """Send packets of hosts through a running delay line.

    Hosts receive packets through their old link, renamed to ``in0``.
    """
    for host in (head, *hosts):
        # Packets arrive on another interface than replies leave.
        host.do("tee", "/proc/sys/net/ipv4/conf/all/rp_filter", input="0")
    head.do("tee", "/proc/sys/net/ipv4/ip_forward", input="1")
    _ip(head, [f"link set {BACK} up"])
    names = addresses([host.name for host in hosts])
    for host in hosts:
        steps = [
            *("link set eth0 down", "addr flush dev eth0", "link set eth0 name in0"),
            *("link set in0 up", f"link set {OUT} name eth0"),
            *(f"addr add {names[host.name]}/24 dev eth0", "link set eth0 up"),
        ]
        _ip(host, steps)


def _ip(host: Host, steps: Sequence[str]) -> None:
    host.do("ip", "-batch", "-", input="\n".join(steps) + "\n")
