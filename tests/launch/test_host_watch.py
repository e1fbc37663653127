from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.managed_hosts import HostState, ManagedHost, managed_hosts_text
from hvdtrain.launch import host_watch
from hvdtrain.launch.host_watch import HostWatch


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
        self.path.write_text(managed_hosts_text(all_hosts))

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
    monkeypatch.setattr(host_watch, "QUIET_S", 0.0)
    monkeypatch.setattr(host_watch, "PATIENCE_S", 0.0)
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
    monkeypatch.setattr(host_watch, "PATIENCE_S", 60.0)
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
    monkeypatch.setattr(host_watch, "NEWS_S", 0.2)
    watch = manager.watch()
    manager.tell(a="there")
    watch.begin(["a"], 1)
    assert watch.taken() == {}, "it ended by itself"
