"""The classic TensorFlow cluster, whose every task was started by hand on its host.

It names the hosts of the tasks by their kind: as JSON in a file or in the variable ``TF_CONFIG``,
``{"worker": ["h1:2222", "h2:2222"], "ps": ["h3:2222"]}``, or in two lists, ``--worker-hosts`` and
``--ps-hosts``. Here one launch starts all tasks as ranks, and MPI makes the connections: ports
may stand there and are not used, nor is the task of the process that reads it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.cluster.hosts import Host, merge_hosts, read_names
from hvdtrain.errors import ConfigurationError

__all__ = ["ClassicCluster", "hosts_and_servers", "parse_cluster", "parse_task_lists"]

_KINDS = ("chief", "worker", "ps")
_FILE_EXPECTED = (
    'Expected JSON that names the hosts of all tasks, like {"worker": ["h1:2222", "h2:2222"], '
    '"ps": ["h3:2222"]}; "chief", with one host, is worker 0 where it is given.'
)
_LISTS_EXPECTED = (
    "Expected the hosts of all tasks, like --worker-hosts h1:2222,h2:2222 --ps-hosts h3:2222."
)


@dataclass(frozen=True, kw_only=True)
class ClassicCluster:
    """The hosts of the tasks; a host stands there once for each of its tasks.

    Attributes:
        workers: By the index of the task; the first is the chief's.
        servers: By the index of the task; empty for none.
    """

    workers: tuple[str, ...]
    servers: tuple[str, ...] = ()


def parse_cluster(text: str, source: str) -> ClassicCluster:
    """Read a cluster from JSON, bare or as ``cluster`` in what ``TF_CONFIG`` holds.

    Raises:
        ConfigurationError: It is something else, or names no worker; the message names the source
            and what is expected.
    """
    try:
        return _cluster(_tasks(_load(text)))
    except ValueError as error:
        raise ConfigurationError(f"{source} can't be used: {error}. {_FILE_EXPECTED}") from None


def parse_task_lists(workers: str, servers: str | None) -> ClassicCluster:
    """Read the values of ``--worker-hosts`` and ``--ps-hosts``.

    Raises:
        ConfigurationError: Something in them is no host.
    """
    tasks = {"worker": [workers]} | ({} if servers is None else {"ps": [servers]})
    try:
        return _cluster(tasks)
    except ValueError as error:
        raise ConfigurationError(
            f"--worker-hosts and --ps-hosts can't be used: {error}. {_LISTS_EXPECTED}"
        ) from None


def hosts_and_servers(cluster: ClassicCluster) -> tuple[list[Host], tuple[int, ...]]:
    """The hosts, with a slot for each task, in the order of ranks; and the servers' ranks.

    Hosts come in the order of the workers' tasks, so that worker 0 is rank 0, then those that only
    serve. The ranks of a host follow each other, its workers before its servers: where hosts take
    turns in the lists, the other ranks are not in the order of the tasks.
    """
    hosts = merge_hosts(Host(name=name, slots=1) for name in (*cluster.workers, *cluster.servers))
    serving = Counter(name.lower() for name in cluster.servers)
    servers: list[int] = []
    after = 0
    for host in hosts:
        after += host.slots
        servers += range(after - serving[host.name.lower()], after)
    return hosts, tuple(servers)


# What follows raises ValueError with the reason only; the functions above say where it is.


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error})") from None


def _tasks(content: Any) -> Mapping[str, list[str]]:
    """The addresses by kind of task."""
    if isinstance(content, dict) and "cluster" in content:
        content = content["cluster"]
    if not isinstance(content, dict):
        raise ValueError(f"it holds {json.dumps(content)}, which names no tasks")
    for kind, addresses in content.items():
        if kind not in _KINDS:
            raise ValueError(f"{kind!r} is no kind of task that there is; remove it")
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ValueError(f"{kind!r} is {json.dumps(addresses)}, not a list of texts")
        if not addresses:
            raise ValueError(f"{kind!r} is empty")
    return content


def _cluster(tasks: Mapping[str, list[str]]) -> ClassicCluster:
    hosts = {
        kind: [host for text in tasks.get(kind, ()) for host in _hosts(text)] for kind in _KINDS
    }
    if len(hosts["chief"]) > 1:
        raise ValueError(f"'chief' names {len(hosts['chief'])} hosts")
    workers = (*hosts["chief"], *hosts["worker"])
    if not workers:
        raise ValueError("it names no 'worker'")
    return ClassicCluster(workers=workers, servers=tuple(hosts["ps"]))


def _hosts(text: str) -> list[str]:
    """The hosts of ``h1:2222``, or of several with commas between; the port may be missing."""
    named = read_names(text)
    for name, port in named:
        if port is not None and not port.isdecimal():
            raise ValueError(f"{port!r} behind {name} is no port")
    return [name for name, _ in named]
