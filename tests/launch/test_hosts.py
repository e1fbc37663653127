"""Arguments that name hosts, and managed hosts."""

from __future__ import annotations

import argparse
import logging
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.managed_hosts import HostState, ManagedHost, format_managed_hosts
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch import hosts as module
from hvdtrain.launch.hosts import HostWatch, add_host_arguments, named_hosts


def test_hosts_from_the_command_line() -> None:
    assert named_hosts("a:2,b", None) == [Host(name="a", slots=2), Host(name="b", slots=1)]
    assert named_hosts(None, None) is None


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with-a-byte-order-mark"])
def test_hosts_from_a_file(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{mark}a slots=2  # big\nb\n", encoding="utf-8")
    assert named_hosts(None, str(path)) == [Host(name="a", slots=2), Host(name="b", slots=1)]


def test_an_unreadable_hostfile_is_an_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xfd")
    for path, why in (
        (tmp_path / "none", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "it is not UTF-8 text"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            named_hosts(None, str(path))
        assert str(caught.value) == f"The hostfile {path} can't be read: {why}."


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_the_number_of_ranks_is_a_positive_integer(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_host_arguments(parser)
    assert parser.parse_args(["-np", "3"]).num_proc == 3
    with pytest.raises(SystemExit):
        parser.parse_args([f"-np={text}"])
    assert f"got {text!r}: expected a whole number above 0" in capsys.readouterr().err


class Manager:
    """A cluster that assigns hosts to a job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environ = {"HVDTRAIN_MANAGED_HOSTS": str(path)}

    def set(self, **hosts: HostState) -> None:
        """Set the state of each host."""
        all_hosts = [
            ManagedHost(
                name=name, slots=1, state=state, why=f"{name} is affected" * (state != "there")
            )
            for name, state in hosts.items()
        ]
        self.path.write_text(format_managed_hosts(all_hosts))

    def watch(self, *, ranks: int = 2, may_grow: bool = False) -> HostWatch:
        """Return the watch of a job with one rank per host."""
        return HostWatch(self.environ, ranks=ranks, slots=ranks, may_grow=may_grow)


@pytest.fixture
def manager(tmp_path: Path) -> Manager:
    return Manager(tmp_path / "hosts.json")


def _reason(watch: HostWatch, at: float, saved_at: float | None = None) -> str:
    return watch.reason_to_restart(at, saved_at)


def test_unmanaged_hosts_never_change() -> None:
    watch = HostWatch({}, ranks=2, slots=2, may_grow=True)
    watch.begin(["a"], 2)
    assert (watch.is_managed, _reason(watch, 1.0), watch.removed()) == (False, "", {})


def test_ranks_leave_a_host_before_its_removal(manager: Manager) -> None:
    watch = manager.watch()
    manager.set(a="there", b="there")
    watch.begin(["a", "b"], 2)
    assert _reason(watch, 0.0) == ""
    manager.set(a="there", b="going")
    assert _reason(watch, 0.1) == "", "read at intervals"
    assert (
        _reason(watch, 1.0) == "b (b is affected) will be removed; saving a checkpoint to restart"
    )
    assert watch.removed() == {"b": "b is affected"}
    watch.begin(["a"], 1)
    assert _reason(watch, 2.0) == "", "no rank runs there"


def test_new_hosts_join_after_the_next_checkpoint(manager: Manager) -> None:
    watch = manager.watch(may_grow=True)
    manager.set(a="there", b="there")
    watch.begin(["a", "b"], 2)
    manager.set(a="there", b="there", c="missing")
    assert _reason(watch, 1.0, saved_at=0.5) == ""
    manager.set(a="there", b="there", c="there")
    assert _reason(watch, 2.0, saved_at=0.5) == "", "an earlier checkpoint may be old"
    assert _reason(watch, 3.0, saved_at=2.5) == "checkpoint written; restarting with 1 more rank"
    fixed = manager.watch()
    fixed.begin(["a", "b"], 2)
    assert _reason(fixed, 1.0) == _reason(fixed, 2.0, saved_at=1.5) == "", (
        "a fixed job does not grow"
    )


def test_only_a_growing_job_starts_without_all_hosts(
    manager: Manager, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    caplog.set_level(logging.WARNING)
    manager.set(a="there", b="missing")
    one = [Host(name="a", slots=1)]
    assert manager.watch(may_grow=True).await_hosts(1, []) == (one, 1)
    received: list[int] = []
    signalled = threading.Timer(0.5, lambda: received.append(15))
    signalled.start()
    start = time.monotonic()
    assert manager.watch().await_hosts(1, received) == (one, 1)
    assert time.monotonic() - start > 0.4
    assert "waiting for b (b is affected)" in caplog.text
    back = threading.Timer(0.5, lambda: manager.set(a="there", b="there"))
    back.start()
    both = [*one, Host(name="b", slots=1)]
    assert manager.watch(may_grow=True).await_hosts(2, []) == (both, 2)
    manager.set(a="there", b="missing")
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    back = threading.Timer(0.5, lambda: manager.set(a="there", b="there"))
    back.start()
    assert manager.watch(may_grow=True).await_hosts(1, []) == (both, 2), (
        "it returns within the patience"
    )


def test_an_unreadable_file_changes_nothing(manager: Manager) -> None:
    watch = manager.watch()
    manager.set(a="there")
    watch.begin(["a"], 1)
    manager.path.write_text("[{")
    assert _reason(watch, 1.0) == ""
    manager.path.unlink()
    assert _reason(watch, 2.0) == ""


def test_removed_waits_for_reports_of_removed_hosts(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPORT_DELAY_S", 0.2)
    watch = manager.watch()
    manager.set(a="there")
    watch.begin(["a"], 1)
    assert watch.removed() == {}, "the host was not removed"
