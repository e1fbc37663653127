"""The hosts' network: a bridge on the head, and a link from it to each host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.testbed.delay_line import BACK, OUT
from tests.testbed.hosts import Host

__all__ = ["addresses", "connect", "delay_links", "hosts_text", "set_link", "shape_link"]

# The head has a network of its own as well: nothing of this is visible to the machine, so that
# numbers and names are free, whatever else runs here.
_SUBNET = "10.77.0"
_BRIDGE = "br0"


def addresses(hosts: Sequence[str]) -> dict[str, str]:
    """The address of the head and of each host."""
    numbers = {"head": 254, **{name: number for number, name in enumerate(hosts, start=1)}}
    return {name: f"{_SUBNET}.{number}" for name, number in numbers.items()}


def hosts_text(names: Mapping[str, str]) -> str:
    """The text of /etc/hosts for all."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {name}" for name, address in names.items()]
    return "\n".join(lines) + "\n"


def connect(head: Host, hosts: Sequence[Host]) -> None:
    """Link the hosts; on the head, the link to a host bears the host's name."""
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
    """Put the link to the host ``name`` ``up`` or ``down``."""
    _ip(head, [f"link set {name} {state}"])


def shape_link(head: Host, host: Host, rate: str, queue_ms: int) -> None:
    """Let the link to a host carry no more than ``rate``, as tc writes it, in each direction."""
    shaper = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", f"{queue_ms}ms")
    host.do("tc", "qdisc", "replace", "dev", "eth0", *shaper)
    head.do("tc", "qdisc", "replace", "dev", host.name, *shaper)


def delay_links(head: Host, hosts: Sequence[Host]) -> None:
    """Let what hosts send go through the devices of a delay line, which is there already.

    What they receive still comes in where it did, by a link that is called ``in0`` now.
    """
    for host in (head, *hosts):
        # What comes in is from where nothing would be sent back to.
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
