from __future__ import annotations

import json

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.placement import place
from hvdtrain.cluster.tf_config import (
    TaskHosts,
    hosts_and_servers,
    parse_cluster,
    parse_task_lists,
)
from hvdtrain.errors import ConfigurationError

SPEC = {"worker": ["h1:2222", "h2:2222"], "ps": ["h3:2222"]}
CLUSTER = TaskHosts(workers=("h1", "h2"), servers=("h3",))

READ = {
    "tf-config": ({"cluster": SPEC, "task": {"type": "ps", "index": 0}}, CLUSTER),
    "chief": (
        {"worker": ["h2:1"], "chief": ["h1:1"], "ps": ["h3:1"]},
        CLUSTER,
    ),
    "chief-alone": ({"chief": ["h1"]}, TaskHosts(workers=("h1",))),
    "no-servers": ({"worker": ["h1", "h2:80"]}, TaskHosts(workers=("h1", "h2"))),
    "one-host": (
        {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]},
        TaskHosts(workers=("localhost", "localhost"), servers=("localhost",)),
    ),
    "addresses": (
        {"worker": ["10.0.0.1:2222", "[fe80::1]:2222", "fe80::2", "[fe80::3]"], "ps": ["a.b-c"]},
        TaskHosts(workers=("10.0.0.1", "fe80::1", "fe80::2", "fe80::3"), servers=("a.b-c",)),
    ),
    "several-in-one": (
        {"worker": ["node[01-02]:2222", "a,b"]},
        TaskHosts(workers=("node01", "node02", "a", "b")),
    ),
}


@pytest.mark.parametrize(("content", "cluster"), READ.values(), ids=READ)
def test_parse_cluster(content: object, cluster: TaskHosts) -> None:
    assert parse_cluster(json.dumps(content), "cluster.json") == cluster


def test_parse_task_lists() -> None:
    assert parse_task_lists("h1:2222, h2:2222", "h3:2222") == CLUSTER
    assert parse_task_lists("h1", None) == TaskHosts(workers=("h1",))
    assert parse_task_lists("[fe80::1]:2222,h2", "h2:1").workers == ("fe80::1", "h2")


BAD = {
    "no-json": ("{'worker': ['a']}", "it is not valid JSON (Expecting property name"),
    "list-inside": ('{"cluster": ["a"]}', '["a"] is not an object with lists of tasks'),
    "no-worker": ('{"ps": ["a"]}', "'worker' is missing"),
    "empty-list": ('{"worker": []}', "'worker' is empty"),
    "empty-servers": ('{"worker": ["a"], "ps": []}', "'ps' is empty"),
    "evaluator": ('{"worker": ["a"], "evaluator": ["b"]}', "'evaluator' is not a supported kind"),
    "two-chiefs": ('{"chief": ["a", "b"]}', "'chief' has 2 hosts"),
    "text": ('{"worker": "a:1"}', "'worker' is \"a:1\", not a list of strings"),
    "no-host": ('{"worker": ["a", "-x:1"]}', "'-x' is not a valid host"),
    "missing": ('{"worker": [""]}', "a host is missing"),
    "no-port": ('{"worker": ["a:x"]}', "'x' after a is not a port"),
    "url": ('{"worker": ["grpc://a:1"]}', "is not a valid IPv6 address"),
}


@pytest.mark.parametrize(("text", "problem"), BAD.values(), ids=BAD)
def test_an_invalid_cluster_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_cluster(text, "runs/cluster.json")
    message = str(raised.value)
    assert message.startswith("runs/cluster.json is invalid: ")
    assert problem in message
    assert '{"worker": ["h1:2222", "h2:2222"]' in message


@pytest.mark.parametrize(
    ("workers", "servers", "problem"),
    [
        ("", "a", "a host is missing"),
        ("a", "b c", "'b c' is not a valid host"),
        ("a:", "b", "'' after a"),
    ],
)
def test_invalid_task_lists_are_an_error(workers: str, servers: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_task_lists(workers, servers)
    assert str(raised.value).startswith(f"--worker-hosts or --ps-hosts is invalid: {problem}")
    assert "--worker-hosts h1:2222,h2:2222 --ps-hosts h3:2222" in str(raised.value)


# Workers and servers, followed by hosts with slots and the ranks of the servers.
ARRANGED = {
    "apart": ("a b", "c d", "a:1 b:1 c:1 d:1", (2, 3)),
    "one-host": ("a a", "a", "a:3", (2,)),
    "servers-among-workers": ("a b", "a b", "a:2 b:2", (1, 3)),
    "grouped": ("a b a", "c a", "a:3 b:1 c:1", (2, 4)),
    "the-first-worker-first": ("b a", "a", "b:1 a:2", (2,)),
    "other-case": ("Node1 b", "NODE1", "Node1:2 b:1", (1,)),
    "no-servers": ("a b", "", "a:1 b:1", ()),
}


@pytest.mark.parametrize(("workers", "servers", "slots", "ranks"), ARRANGED.values(), ids=ARRANGED)
def test_hosts_and_servers(workers: str, servers: str, slots: str, ranks: tuple[int, ...]) -> None:
    cluster = TaskHosts(workers=tuple(workers.split()), servers=tuple(servers.split()))
    hosts, ps_ranks = hosts_and_servers(cluster)
    named = (text.split(":") for text in slots.split())
    assert hosts == [Host(name=name, slots=int(count)) for name, count in named]
    assert ps_ranks == ranks
    places = place(hosts, None, servers=ps_ranks)
    assert (places[0].host, places[0].role) == (cluster.workers[0], "chief")
    server_hosts = [entry.host.lower() for entry in places if entry.role == "ps"]
    assert sorted(server_hosts) == sorted(name.lower() for name in cluster.servers)
