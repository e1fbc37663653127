"""Every rank has one role, the same for whoever asks; what the ranks don't suffice for is told."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.cluster.hosts import Host, parse_hosts
from hvdtrain.cluster.placement import place
from hvdtrain.cluster.roles import Roles, assign_roles, remaining
from hvdtrain.cluster.tf_config import ClassicCluster, hosts_and_servers
from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError


def of(size: int, mode: str = "async-ps", **settings: Any) -> Roles:
    return assign_roles(size, Settings(mode=mode, **settings))


# Ranks and settings; workers, servers.
ASSIGNED = {
    "none": ((3, "allreduce", {}), (0, 1, 2), ()),
    "none-whatever-is-said": (
        (2, "allreduce", {"num_ps": 9, "ps_ranks": (0, 7), "backup_workers": 5}),
        (0, 1),
        (),
    ),
    "the-last": ((4, "async-ps", {}), (0, 1, 2), (3,)),
    "the-last-two": ((5, "sync-ps", {"num_ps": 2}), (0, 1, 2), (3, 4)),
    "one-worker": ((3, "async-ps", {"num_ps": 2}), (0,), (1, 2)),
    "named": ((5, "async-ps", {"ps_ranks": (1, 3)}), (0, 2, 4), (1, 3)),
    "named-wins": ((3, "async-ps", {"num_ps": 3, "ps_ranks": (1,)}), (0, 2), (1,)),
    "backups": ((4, "sync-ps", {"backup_workers": 2}), (0, 1, 2), (3,)),
    "backups-of-another-mode": ((3, "async-ps", {"backup_workers": 2}), (0, 1), (2,)),
}


@pytest.mark.parametrize(("asked", "workers", "servers"), ASSIGNED.values(), ids=ASSIGNED)
def test_roles(
    asked: tuple[int, str, dict[str, Any]], workers: tuple[int, ...], servers: tuple[int, ...]
) -> None:
    size, mode, settings = asked
    assert of(size, mode, **settings) == Roles(workers=workers, servers=servers)


def test_every_rank_has_one_role_and_the_chief_trains() -> None:
    for size in range(2, 9):
        for num_ps in range(1, size):
            roles = of(size, num_ps=num_ps)
            assert sorted(roles.workers + roles.servers) == list(range(size))
            assert (roles.workers[0], len(roles.servers)) == (0, num_ps)


TOO_FEW = {
    "no-worker": (
        (4, {"num_ps": 4}),
        "4 ranks with 4 parameter servers (--num-ps, HVDTRAIN_NUM_PS) leave no worker; expected at "
        "least one worker and one server: start 5 ranks or more, or take fewer servers.",
    ),
    "alone": (
        (1, {}),
        "1 rank with 1 parameter server (--num-ps, HVDTRAIN_NUM_PS) leaves no worker; expected at "
        "least one worker and one server: start 2 ranks or more.",
    ),
    "no-such-rank": (
        (4, {"ps_ranks": (2, 5)}),
        "Parameter servers are to be on ranks 2, 5 (--ps-ranks, HVDTRAIN_PS_RANKS), but the last "
        "of 4 ranks is rank 3; expected ranks that there are, other than 0: start 6 ranks or more, "
        "or name others.",
    ),
    "chief": (
        (4, {"ps_ranks": (0,)}),
        "Parameter servers are to be on rank 0 (--ps-ranks, HVDTRAIN_PS_RANKS), but rank 0 is the "
        "chief, which is worker 0 and trains; expected other ranks.",
    ),
    "only-backups": (
        (4, {"mode": "sync-ps", "num_ps": 2, "backup_workers": 2}),
        "2 backup workers (--backup-workers, HVDTRAIN_BACKUP_WORKERS) leave no gradient to step "
        "with: 4 ranks less 2 parameter servers are 2 workers; expected at most 1. Start more "
        "ranks, or do without fewer workers.",
    ),
}


@pytest.mark.parametrize(("asked", "told"), TOO_FEW.values(), ids=TOO_FEW)
def test_what_the_ranks_do_not_suffice_for(asked: tuple[int, dict[str, Any]], told: str) -> None:
    size, settings = asked
    with pytest.raises(ConfigurationError) as raised:
        of(size, **settings)
    assert str(raised.value) == told


# Hosts and ranks that serve at first; hosts that are left; what they are then, in order of ranks.
LEFT = {
    "a-worker-is-lost": ("a:1,b:1,c:1,d:1", (3,), "a:1,c:1,d:1", "a c | d"),
    "a-server-is-lost": ("a:1,b:1,c:1,d:1", (2, 3), "a:1,b:1,d:1", "a b | d"),
    "the-chief-is-lost": ("a:1,b:2,c:1", (2,), "b:2,c:1", "b c | b"),
    "who-only-serves-comes-last": ("a:1,s:1,b:1", (1,), "s:1,b:1", "b | s"),
    "workers-come-before-servers": ("a:1,b:3", (1,), "b:3", "b b | b"),
    "others-are-workers": ("a:2,b:2", (3,), "b:2,c:1", "b c | b"),
}


@pytest.mark.parametrize(("there", "servers", "left", "expected"), LEFT.values(), ids=LEFT)
def test_servers_stay_on_their_hosts(
    there: str, servers: tuple[int, ...], left: str, expected: str
) -> None:
    hosts = parse_hosts(left)
    ranks = sum(host.slots for host in hosts)
    before = place(parse_hosts(there), None, servers=servers)
    then = remaining(before, hosts, ranks, oversubscribe=False)
    hosts_then, ps_ranks = hosts_and_servers(then)
    places = place(hosts_then, None, servers=ps_ranks)
    workers, serving = expected.split(" | ")
    assert [entry.host for entry in places if entry.role != "ps"] == workers.split()
    assert [entry.host for entry in places if entry.role == "ps"] == serving.split()
    assert places[0].role == "chief"
    # Another loss of the same kind finds the same.
    assert remaining(places, hosts, ranks, oversubscribe=False) == then


def test_hosts_that_take_more_than_their_slots() -> None:
    hosts = [Host(name="a", slots=1, max_slots=2), Host(name="b", slots=1, max_slots=2)]
    before = place([*hosts, Host(name="c", slots=2)], 6, servers=(3,), oversubscribe=True)
    assert [entry.host for entry in before] == ["a", "a", "b", "b", "c", "c"]
    left = remaining(before, hosts, 4, oversubscribe=True)
    assert left == ClassicCluster(workers=("a", "a", "b"), servers=("b",))


def test_nothing_goes_on_without_workers_or_without_servers() -> None:
    before = place(parse_hosts("a:1,b:1,s:1,t:1"), None, servers=(2, 3))
    with pytest.raises(ConfigurationError, match=r"^all workers are lost with a, b, and what is "):
        remaining(before, parse_hosts("s:1,t:1"), 2, oversubscribe=False)
    with pytest.raises(ConfigurationError) as raised:
        remaining(before, parse_hosts("a:1,b:1"), 2, oversubscribe=False)
    assert str(raised.value) == (
        "all servers are lost with s, t, and what is left has only workers; expected at least one "
        "worker and one parameter server"
    )
