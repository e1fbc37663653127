from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.cluster.hosts import Host, parse_hosts
from hvdtrain.cluster.placement import place
from hvdtrain.cluster.roles import Roles, assign_roles, remaining_tasks
from hvdtrain.cluster.tf_config import TaskHosts, hosts_and_servers
from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError


def assign(size: int, mode: str = "async-ps", **settings: Any) -> Roles:
    return assign_roles(size, Settings(mode=mode, **settings))


# Ranks and settings, followed by workers and servers.
ASSIGNED = {
    "no-servers": ((3, "allreduce", {}), (0, 1, 2), ()),
    "other-settings-ignored": (
        (2, "allreduce", {"num_ps": 9, "ps_ranks": (0, 7), "backup_workers": 5}),
        (0, 1),
        (),
    ),
    "last-by-default": ((4, "async-ps", {}), (0, 1, 2), (3,)),
    "last-two": ((5, "sync-ps", {"num_ps": 2}), (0, 1, 2), (3, 4)),
    "one-worker": ((3, "async-ps", {"num_ps": 2}), (0,), (1, 2)),
    "named": ((5, "async-ps", {"ps_ranks": (1, 3)}), (0, 2, 4), (1, 3)),
    "ps-ranks-win": ((3, "async-ps", {"num_ps": 3, "ps_ranks": (1,)}), (0, 2), (1,)),
    "backups": ((4, "sync-ps", {"backup_workers": 2}), (0, 1, 2), (3,)),
    "backups-ignored": ((3, "async-ps", {"backup_workers": 2}), (0, 1), (2,)),
}


@pytest.mark.parametrize(("arguments", "workers", "servers"), ASSIGNED.values(), ids=ASSIGNED)
def test_assign_roles(
    arguments: tuple[int, str, dict[str, Any]], workers: tuple[int, ...], servers: tuple[int, ...]
) -> None:
    size, mode, settings = arguments
    assert assign(size, mode, **settings) == Roles(workers=workers, servers=servers)


def test_every_rank_has_one_role_and_the_chief_trains() -> None:
    for size in range(2, 9):
        for num_ps in range(1, size):
            roles = assign(size, num_ps=num_ps)
            assert sorted(roles.workers + roles.servers) == list(range(size))
            assert (roles.workers[0], len(roles.servers)) == (0, num_ps)


TOO_FEW = {
    "no-worker": (
        (4, {"num_ps": 4}),
        "4 ranks with 4 parameter servers (--num-ps, HVDTRAIN_NUM_PS) leave no worker; start at "
        "least 5 ranks, or use fewer servers.",
    ),
    "alone": (
        (1, {}),
        "1 rank with 1 parameter server (--num-ps, HVDTRAIN_NUM_PS) leaves no worker; start at "
        "least 2 ranks.",
    ),
    "no-such-rank": (
        (4, {"ps_ranks": (2, 5)}),
        "ps_ranks (--ps-ranks, HVDTRAIN_PS_RANKS) is 2, 5, but the last of 4 ranks is rank 3; "
        "start 6 ranks or more, or name other ranks.",
    ),
    "chief": (
        (4, {"ps_ranks": (0,)}),
        "ps_ranks (--ps-ranks, HVDTRAIN_PS_RANKS) is 0, but rank 0 is the chief and trains; name "
        "other ranks.",
    ),
    "only-backups": (
        (4, {"mode": "sync-ps", "num_ps": 2, "backup_workers": 2}),
        "backup_workers (--backup-workers, HVDTRAIN_BACKUP_WORKERS) must be less than the number "
        "of workers, 2, got 2; start more ranks or use fewer backup workers.",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), TOO_FEW.values(), ids=TOO_FEW)
def test_too_few_ranks_are_an_error(arguments: tuple[int, dict[str, Any]], message: str) -> None:
    size, settings = arguments
    with pytest.raises(ConfigurationError) as raised:
        assign(size, **settings)
    assert str(raised.value) == message


# Hosts and server ranks before the loss, hosts after it, and workers | servers in rank order.
LEFT = {
    "worker-lost": ("a:1,b:1,c:1,d:1", (3,), "a:1,c:1,d:1", "a c | d"),
    "server-lost": ("a:1,b:1,c:1,d:1", (2, 3), "a:1,b:1,d:1", "a b | d"),
    "chief-lost": ("a:1,b:2,c:1", (2,), "b:2,c:1", "b c | b"),
    "server-only-host-is-last": ("a:1,s:1,b:1", (1,), "s:1,b:1", "b | s"),
    "workers-before-servers": ("a:1,b:3", (1,), "b:3", "b b | b"),
    "new-host": ("a:2,b:2", (3,), "b:2,c:1", "b c | b"),
}


@pytest.mark.parametrize(("before", "servers", "left", "expected"), LEFT.values(), ids=LEFT)
def test_servers_stay_on_their_hosts(
    before: str, servers: tuple[int, ...], left: str, expected: str
) -> None:
    hosts = parse_hosts(left)
    ranks = sum(host.slots for host in hosts)
    places = place(parse_hosts(before), None, servers=servers)
    tasks = remaining_tasks(places, hosts, ranks, oversubscribe=False)
    new_hosts, ps_ranks = hosts_and_servers(tasks)
    places = place(new_hosts, None, servers=ps_ranks)
    workers, server_hosts = expected.split(" | ")
    assert [entry.host for entry in places if entry.role != "ps"] == workers.split()
    assert [entry.host for entry in places if entry.role == "ps"] == server_hosts.split()
    assert places[0].role == "chief"
    assert remaining_tasks(places, hosts, ranks, oversubscribe=False) == tasks


def test_oversubscribed_hosts_after_a_loss() -> None:
    hosts = [Host(name="a", slots=1, max_slots=2), Host(name="b", slots=1, max_slots=2)]
    before = place([*hosts, Host(name="c", slots=2)], 6, servers=(3,), oversubscribe=True)
    assert [entry.host for entry in before] == ["a", "a", "b", "b", "c", "c"]
    left = remaining_tasks(before, hosts, 4, oversubscribe=True)
    assert left == TaskHosts(workers=("a", "a", "b"), servers=("b",))


def test_the_loss_of_all_workers_or_servers_is_an_error() -> None:
    before = place(parse_hosts("a:1,b:1,s:1,t:1"), None, servers=(2, 3))
    with pytest.raises(ConfigurationError, match=r"^all workers are lost with a, b; training "):
        remaining_tasks(before, parse_hosts("s:1,t:1"), 2, oversubscribe=False)
    with pytest.raises(ConfigurationError) as raised:
        remaining_tasks(before, parse_hosts("a:1,b:1"), 2, oversubscribe=False)
    assert str(raised.value) == (
        "all servers are lost with s, t; training needs at least one worker and one parameter "
        "server"
    )
