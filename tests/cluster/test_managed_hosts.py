from __future__ import annotations

import pytest

from hvdtrain.cluster.managed_hosts import (
    HostState,
    ManagedHost,
    format_managed_hosts,
    leaving_hosts,
    lost_hosts,
    parse_managed_hosts,
    target_ranks,
)
from hvdtrain.errors import ConfigurationError


def _host(name: str, state: HostState = "there", generation: str = "1", why: str = "", slots=2):
    return ManagedHost(name=name, slots=slots, state=state, generation=generation, why=why)


def test_a_file_round_trip() -> None:
    hosts = (_host("a"), _host("b", "missing", why='"no" node\n'))
    assert parse_managed_hosts(format_managed_hosts(hosts)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}1", "[1]", '[{"name": "a"}]'),
        '[{"name": "a", "slots": 0, "state": "there"}]',
        '[{"name": "a", "slots": 1, "state": "here"}]',
    ],
)
def test_an_invalid_file_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="HVDTRAIN_MANAGED_HOSTS"):
        parse_managed_hosts(text)


def test_lost_and_leaving_hosts() -> None:
    before = [_host(name) for name in "abcdefgh"]
    now = [
        _host("a"),
        _host("b", "missing", why="Evicted: no memory"),
        _host("c", generation="2"),
        _host("d", "going", why="its pod is deleted"),
        _host("f", "missing", why="no ranks there"),
        _host("g", "missing", generation="2", why="its pod starts"),
        _host("h", "missing", generation="", why="its pod is pending"),
    ]
    assert lost_hosts(before, now, used="abcdegh") == {
        "b": "Evicted: no memory",
        "c": "it was replaced",
        "d": "its pod is deleted",
        "e": "it was removed from the job",
        "g": "it was replaced",
        "h": "it is gone",
    }
    assert leaving_hosts(now, used="abd") == {"d": "its pod is deleted"}
    assert leaving_hosts(now, used="ab") == {}
    assert leaving_hosts(now, used="ae") == {"e": "it was removed from the job"}
    assert leaving_hosts([], used="ae") == {}, "the file has not been written yet"


def test_each_new_slot_adds_a_rank() -> None:
    three = [_host("a"), _host("b"), _host("c", "missing")]
    # A job of three ranks that had four slots.
    assert target_ranks(three[:2], ranks=3, slots=4) == 3
    assert target_ranks(three, ranks=3, slots=4) == 4
    assert target_ranks([*three[:2], _host("c")], ranks=3, slots=4) == 5
    assert target_ranks(three[:1], ranks=3, slots=4) == 2
