from __future__ import annotations

import pytest

from hvdtrain.cluster.managed_hosts import (
    HostState,
    ManagedHost,
    going,
    managed_hosts_text,
    parse_managed_hosts,
    ranks_for,
    taken_away,
)
from hvdtrain.errors import ConfigurationError


def _host(name: str, state: HostState = "there", generation: str = "1", why: str = "", slots=2):
    return ManagedHost(name=name, slots=slots, state=state, generation=generation, why=why)


def test_hosts_are_read_as_they_were_written() -> None:
    hosts = (_host("a"), _host("b", "missing", why='"no" node\n'))
    assert parse_managed_hosts(managed_hosts_text(hosts)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}1", "[1]", '[{"name": "a"}]'),
        '[{"name": "a", "slots": 0, "state": "there"}]',
        '[{"name": "a", "slots": 1, "state": "here"}]',
    ],
)
def test_something_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="HVDTRAIN_MANAGED_HOSTS"):
        parse_managed_hosts(text)


def test_what_was_taken_away_is_told_of_hosts_with_ranks() -> None:
    before = [_host(name) for name in "abcdefgh"]
    now = [
        _host("a"),
        _host("b", "missing", why="Evicted: no memory"),
        _host("c", generation="2"),
        _host("d", "going", why="its pod is deleted"),
        _host("f", "missing", why="nobody is there"),
        _host("g", "missing", generation="2", why="its pod starts"),
        _host("h", "missing", generation="", why="its pod is to come"),
    ]
    assert taken_away(before, now, used="abcdegh") == {
        "b": "Evicted: no memory",
        "c": "it was replaced",
        "d": "its pod is deleted",
        "e": "it is taken out of the job",
        "g": "it was replaced",
        "h": "it is gone",
    }
    assert going(now, used="abd") == {"d": "its pod is deleted"}
    assert going(now, used="ab") == {}
    assert going(now, used="ae") == {"e": "it is taken out of the job"}
    assert going([], used="ae") == {}, "nobody has told anything yet"


def test_each_new_slot_takes_a_rank() -> None:
    three = [_host("a"), _host("b"), _host("c", "missing")]
    # Of four slots three were asked for, on hosts that are there or to come.
    assert ranks_for(three[:2], ranks=3, slots=4) == 3
    assert ranks_for(three, ranks=3, slots=4) == 4
    assert ranks_for([*three[:2], _host("c")], ranks=3, slots=4) == 5
    assert ranks_for(three[:1], ranks=3, slots=4) == 2
