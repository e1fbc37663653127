"""Names and addresses of this host."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from hvdtrain.cluster.hosts import is_this_host, own_addresses

HERE = socket.gethostname()


@pytest.mark.parametrize("name", ["localhost", "LocalHost", "127.0.0.1", "::1", HERE, HERE.upper()])
def test_names_of_this_host(name: str) -> None:
    assert is_this_host(name)


@pytest.mark.parametrize("name", ["", "node1", f"{HERE}1", f"{HERE}.example.com", "192.0.2.1"])
def test_names_of_other_hosts(name: str) -> None:
    assert not is_this_host(name)


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        ([], ["127.0.0.1"]),
        (["127.0.0.1"], ["127.0.0.1", HERE]),
        (["127.0.0.1", "127.0.0.1"], ["127.0.0.1", HERE]),
        (["no-such-host.invalid"], [HERE]),
        (["no-such-host.invalid", "127.0.0.1"], ["127.0.0.1", HERE]),
    ],
)
def test_own_addresses(hosts: list[str], addresses: list[str]) -> None:
    assert own_addresses(hosts) == addresses


def test_own_addresses_are_numeric() -> None:
    *addresses, name = own_addresses(["localhost", HERE])
    assert name == HERE
    assert addresses
    for address in addresses:
        ipaddress.ip_address(address.partition("%")[0])
