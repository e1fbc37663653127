"""The classic cluster in every form it is written in, and what becomes of its tasks."""

from __future__ import annotations

import json

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.placement import place
from hvdtrain.cluster.tf_config import (
    ClassicCluster,
    hosts_and_servers,
    parse_cluster,
    parse_task_lists,
)
from hvdtrain.errors import ConfigurationError

SPEC = {"worker": ["h1:2222", "h2:2222"], "ps": ["h3:2222"]}
CLUSTER = ClassicCluster(workers=("h1", "h2"), servers=("h3",))

READ = {
    "plain": (SPEC, CLUSTER),
    "tf-config": ({"cluster": SPEC, "task": {"type": "ps", "index": 0}}, CLUSTER),
    "chief": (
        {"worker": ["h2:1"], "chief": ["h1:1"], "ps": ["h3:1"]},
        CLUSTER,
    ),
    "chief-alone": ({"chief": ["h1"]}, ClassicCluster(workers=("h1",))),
    "no-servers": ({"worker": ["h1", "h2:80"]}, ClassicCluster(workers=("h1", "h2"))),
    "one-host": (
        {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]},
        ClassicCluster(workers=("localhost", "localhost"), servers=("localhost",)),
    ),
    "addresses": (
        {"worker": ["10.0.0.1:2222", "[fe80::1]:2222", "fe80::2", "[fe80::3]"], "ps": ["a.b-c"]},
        ClassicCluster(workers=("10.0.0.1", "fe80::1", "fe80::2", "fe80::3"), servers=("a.b-c",)),
    ),
    "several-in-one": (
        {"worker": ["node[01-02]:2222", "a,b"]},
        ClassicCluster(workers=("node01", "node02", "a", "b")),
    ),
}


@pytest.mark.parametrize(("content", "cluster"), READ.values(), ids=READ)
def test_what_is_read(content: object, cluster: ClassicCluster) -> None:
    assert parse_cluster(json.dumps(content), "cluster.json") == cluster


def test_lists() -> None:
    assert parse_task_lists("h1:2222, h2:2222", "h3:2222") == CLUSTER
    assert parse_task_lists("h1", None) == ClassicCluster(workers=("h1",))
    assert parse_task_lists("[fe80::1]:2222,h2", "h2:1").workers == ("fe80::1", "h2")


BAD = {
    "no-json": ("{'worker': ['a']}", "it is no JSON (Expecting property name"),
    "empty": ("", "it is no JSON"),
    "list": ('["a"]', 'it holds ["a"], which names no tasks'),
    "list-inside": ('{"cluster": ["a"]}', 'it holds ["a"], which names no tasks'),
    "nothing": ("{}", "it names no 'worker'"),
    "no-worker": ('{"ps": ["a"]}', "it names no 'worker'"),
    "empty-list": ('{"worker": []}', "'worker' is empty"),
    "empty-servers": ('{"worker": ["a"], "ps": []}', "'ps' is empty"),
    "evaluator": ('{"worker": ["a"], "evaluator": ["b"]}', "'evaluator' is no kind of task"),
    "two-chiefs": ('{"chief": ["a", "b"]}', "'chief' names 2 hosts"),
    "text": ('{"worker": "a:1"}', "'worker' is \"a:1\", not a list of texts"),
    "number": ('{"worker": [1]}', "'worker' is [1], not a list of texts"),
    "no-host": ('{"worker": ["a", "-x:1"]}', "'-x' is no host"),
    "missing": ('{"worker": [""]}', "a host is missing"),
    "no-port": ('{"worker": ["a:x"]}', "'x' behind a is no port"),
    "url": ('{"worker": ["grpc://a:1"]}', "is no IPv6 address"),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_what_can_not_be_used(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_cluster(text, "runs/cluster.json")
    message = str(raised.value)
    assert message.startswith("runs/cluster.json can't be used: ")
    assert told in message
    assert '{"worker": ["h1:2222", "h2:2222"]' in message, "says what is expected"


@pytest.mark.parametrize(
    ("workers", "servers", "told"),
    [("", "a", "a host is missing"), ("a", "b c", "'b c' is no host"), ("a:", "b", "'' behind a")],
)
def test_lists_that_can_not_be_used(workers: str, servers: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_task_lists(workers, servers)
    assert str(raised.value).startswith(f"--worker-hosts and --ps-hosts can't be used: {told}")
    assert "--worker-hosts h1:2222,h2:2222 --ps-hosts h3:2222" in str(raised.value)


# Workers, servers; hosts with their slots, ranks of the servers.
ARRANGED = {
    "apart": ("a b", "c d", "a:1 b:1 c:1 d:1", (2, 3)),
    "one-host": ("a a", "a", "a:3", (2,)),
    "servers-among-workers": ("a b", "a b", "a:2 b:2", (1, 3)),
    "grouped": ("a b a", "c a", "a:3 b:1 c:1", (2, 4)),
    "the-first-worker-first": ("b a", "a", "b:1 a:2", (2,)),
    "spelled-otherwise": ("Node1 b", "NODE1", "Node1:2 b:1", (1,)),
    "no-servers": ("a b", "", "a:1 b:1", ()),
}


@pytest.mark.parametrize(("workers", "servers", "slots", "ranks"), ARRANGED.values(), ids=ARRANGED)
def test_hosts_and_ranks(workers: str, servers: str, slots: str, ranks: tuple[int, ...]) -> None:
    cluster = ClassicCluster(workers=tuple(workers.split()), servers=tuple(servers.split()))
    hosts, ps_ranks = hosts_and_servers(cluster)
    named = (text.split(":") for text in slots.split())
    assert hosts == [Host(name=name, slots=int(count)) for name, count in named]
    assert ps_ranks == ranks
    places = place(hosts, None, servers=ps_ranks)
    assert (places[0].host, places[0].role) == (cluster.workers[0], "chief")
    at = [entry.host.lower() for entry in places if entry.role == "ps"]
    assert sorted(at) == sorted(name.lower() for name in cluster.servers)
