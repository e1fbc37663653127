"""Arguments that name hosts, and hosts that come and go."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import socket
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.cluster.hosts import Host, is_this_host, own_addresses
from hvdtrain.cluster.managed_hosts import HostState, ManagedHost, format_managed_hosts
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch import hosts as module
from hvdtrain.launch.hosts import HostWatch, add_where, named_hosts

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


class Manager:
    """Who gives hosts to a job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environ = {"HVDTRAIN_MANAGED_HOSTS": str(path)}

    def tell(self, **hosts: HostState) -> None:
        """Say how each host is."""
        all_hosts = [
            ManagedHost(name=name, slots=1, state=state, why=f"{name} is so" * (state != "there"))
            for name, state in hosts.items()
        ]
        self.path.write_text(format_managed_hosts(all_hosts))

    def watch(self, *, ranks: int = 2, may_grow: bool = False) -> HostWatch:
        """The watch of a job that was submitted with as many hosts as ranks."""
        return HostWatch(self.environ, ranks=ranks, slots=ranks, may_grow=may_grow)


@pytest.fixture
def manager(tmp_path: Path) -> Manager:
    return Manager(tmp_path / "hosts.json")


def _why(watch: HostWatch, at: float, saved_at: float | None = None) -> str:
    return watch.why_leave(at, saved_at)


def test_hosts_that_nobody_manages_stay() -> None:
    watch = HostWatch({}, ranks=2, slots=2, may_grow=True)
    watch.begin(["a"], 2)
    assert (watch.is_managed, _why(watch, 1.0), watch.taken()) == (False, "", {})


def test_ranks_leave_a_host_that_goes(manager: Manager) -> None:
    watch = manager.watch()
    manager.tell(a="there", b="there")
    watch.begin(["a", "b"], 2)
    assert _why(watch, 0.0) == ""
    manager.tell(a="there", b="going")
    assert _why(watch, 0.1) == "", "it does not look all the time"
    assert _why(watch, 1.0) == "b (b is so); ranks save what they have"
    assert watch.taken() == {"b": "b is so"}
    watch.begin(["a"], 1)
    assert _why(watch, 2.0) == "", "no rank is on it"


def test_what_comes_takes_part_from_the_next_checkpoint_on(manager: Manager) -> None:
    watch = manager.watch(may_grow=True)
    manager.tell(a="there", b="there")
    watch.begin(["a", "b"], 2)
    manager.tell(a="there", b="there", c="missing")
    assert _why(watch, 1.0, saved_at=0.5) == ""
    manager.tell(a="there", b="there", c="there")
    assert _why(watch, 2.0, saved_at=0.5) == "", "a checkpoint of before may be of long ago"
    assert "a checkpoint is written, and 1 rank more" in _why(watch, 3.0, saved_at=2.5)
    fixed = manager.watch()
    fixed.begin(["a", "b"], 2)
    assert _why(fixed, 1.0) == _why(fixed, 2.0, saved_at=1.5) == "", "it has as many as it wants"


def test_others_wait_for_all_and_what_grows_begins(
    manager: Manager, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    caplog.set_level(logging.WARNING)
    manager.tell(a="there", b="missing")
    one = [Host(name="a", slots=1)]
    assert manager.watch(may_grow=True).await_hosts(1, []) == (one, 1)
    received: list[int] = []
    ended = threading.Timer(0.5, lambda: received.append(15))
    ended.start()
    begun = time.monotonic()
    assert manager.watch().await_hosts(1, received) == (one, 1)
    assert time.monotonic() - begun > 0.4
    assert "waits for b (b is so)" in caplog.text
    back = threading.Timer(0.5, lambda: manager.tell(a="there", b="there"))
    back.start()
    both = [*one, Host(name="b", slots=1)]
    assert manager.watch(may_grow=True).await_hosts(2, []) == (both, 2)
    manager.tell(a="there", b="missing")
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    back = threading.Timer(0.5, lambda: manager.tell(a="there", b="there"))
    back.start()
    assert manager.watch(may_grow=True).await_hosts(1, []) == (both, 2), "it comes back at once"


def test_a_file_that_can_not_be_read_changes_nothing(manager: Manager) -> None:
    watch = manager.watch()
    manager.tell(a="there")
    watch.begin(["a"], 1)
    manager.path.write_text("[{")
    assert _why(watch, 1.0) == ""
    manager.path.unlink()
    assert _why(watch, 2.0) == ""


def test_news_is_waited_for_a_moment(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEWS_S", 0.2)
    watch = manager.watch()
    manager.tell(a="there")
    watch.begin(["a"], 1)
    assert watch.taken() == {}, "it ended by itself"
