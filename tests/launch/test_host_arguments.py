"""Which hosts are named, and what this one is called."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from pathlib import Path

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.host_arguments import add_where, named_hosts
from hvdtrain.remote.own_addresses import is_this_host, own_addresses

HERE = socket.gethostname()


@pytest.mark.parametrize("name", ["localhost", "LocalHost", "127.0.0.1", "::1", HERE, HERE.upper()])
def test_names_of_this_host(name: str) -> None:
    assert is_this_host(name)


@pytest.mark.parametrize("name", ["", "node1", f"{HERE}1", f"{HERE}.example.com", "192.0.2.1"])
def test_names_of_others(name: str) -> None:
    assert not is_this_host(name)


def test_alone_the_local_address_will_do() -> None:
    assert own_addresses([]) == ["127.0.0.1"]


def test_the_address_that_leads_to_a_host_and_the_name() -> None:
    assert own_addresses(["127.0.0.1"]) == ["127.0.0.1", HERE]
    assert own_addresses(["127.0.0.1", "127.0.0.1"]) == ["127.0.0.1", HERE], "each once"


def test_hosts_that_nobody_knows_are_passed_over() -> None:
    assert own_addresses(["no-such-host.invalid"]) == [HERE]
    assert own_addresses(["no-such-host.invalid", "127.0.0.1"]) == ["127.0.0.1", HERE]


def test_addresses_are_addresses() -> None:
    *addresses, name = own_addresses(["localhost", HERE])
    assert name == HERE
    assert addresses
    for address in addresses:
        ipaddress.ip_address(address.partition("%")[0])


def test_no_hosts_are_named() -> None:
    assert named_hosts(None, None) is None


def test_hosts_from_the_command_line() -> None:
    assert named_hosts("a:2,b", None) == [Host(name="a", slots=2), Host(name="b", slots=1)]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with-a-mark-from-windows"])
def test_hosts_from_a_file(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{mark}a slots=2  # big\nb\n", encoding="utf-8")
    assert named_hosts(None, str(path)) == [Host(name="a", slots=2), Host(name="b", slots=1)]


def test_hosts_named_twice() -> None:
    with pytest.raises(ConfigurationError, match="give one of them"):
        named_hosts("a", "hosts")


def test_hostfiles_that_can_not_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xfd")
    for path, why in (
        (tmp_path / "none", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "it is no text"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            named_hosts(None, str(path))
        assert str(caught.value) == f"The hostfile {path} can't be read: {why}."


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_ranks_is_a_number(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_where(parser)
    assert parser.parse_args(["-np", "3"]).num_proc == 3
    with pytest.raises(SystemExit):
        parser.parse_args([f"-np={text}"])
    assert f"got {text!r}, expected a whole number above 0" in capsys.readouterr().err
