"""Clusters in TensorFlow's format, which names the hosts of workers and parameter servers.

A cluster is JSON in a file or in the variable ``TF_CONFIG``, such as
``{"worker": ["h1:2222", "h2:2222"], "ps": ["h3:2222"]}``, or the two lists of ``--worker-hosts``
and ``--ps-hosts``. TensorFlow expects each task to be started by hand on its host. hvdtrain
starts all tasks as ranks of one job and lets MPI connect them. It therefore ignores the ports, and
also the ``task`` entry of ``TF_CONFIG``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.cluster.hosts import Host, merge_hosts, split_hosts
from hvdtrain.errors import ConfigurationError

__all__ = ["TaskHosts", "hosts_and_servers", "parse_cluster", "parse_task_lists"]

_KINDS = ("chief", "worker", "ps")
_FILE_EXPECTED = (
    'Expected JSON that names the hosts of all tasks, such as {"worker": ["h1:2222", "h2:2222"], '
    '"ps": ["h3:2222"]}; "chief", with one host, is worker 0 if given.'
)
_LISTS_EXPECTED = (
    "Expected the hosts of all tasks, such as --worker-hosts h1:2222,h2:2222 --ps-hosts h3:2222."
)


@dataclass(frozen=True, kw_only=True)
class TaskHosts:
    """The host of each task. A host with several tasks is repeated."""

    workers: tuple[str, ...]  # hosts of the workers by task index; the first is the chief's
    servers: tuple[str, ...] = ()  # hosts of the parameter servers by task index


def parse_cluster(text: str, source: str) -> TaskHosts:
    """Parse a JSON cluster, or the ``cluster`` entry of ``TF_CONFIG``.

    ``source`` names the origin of the text in error messages.

    Raises:
        ConfigurationError: If the text is invalid or names no worker.
    """
    try:
        return _task_hosts(_tasks(text))
    except ValueError as error:
        raise ConfigurationError(f"{source} is invalid: {error}. {_FILE_EXPECTED}") from None


def parse_task_lists(workers: str, servers: str | None) -> TaskHosts:
    """Parse the values of ``--worker-hosts`` and ``--ps-hosts``.

    Raises:
        ConfigurationError: If a host is invalid.
    """
    try:
        return _task_hosts({"worker": [workers], "ps": [] if servers is None else [servers]})
    except ValueError as error:
        raise ConfigurationError(
            f"--worker-hosts or --ps-hosts is invalid: {error}. {_LISTS_EXPECTED}"
        ) from None


def hosts_and_servers(tasks: TaskHosts) -> tuple[list[Host], tuple[int, ...]]:
    """Return the hosts with one slot per task in rank order, and the ranks of the servers.

    Hosts of workers come first, in task order, so worker 0 is rank 0. The ranks of a host are
    consecutive, with workers before servers. So if the workers' hosts alternate (``a, b, a, b``),
    ranks other than 0 don't follow the task order.
    """
    hosts = merge_hosts(Host(name=name, slots=1) for name in (*tasks.workers, *tasks.servers))
    server_counts = Counter(name.lower() for name in tasks.servers)
    servers: list[int] = []
    end = 0
    for host in hosts:
        end += host.slots
        servers += range(end - server_counts[host.name.lower()], end)
    return hosts, tuple(servers)


def _tasks(text: str) -> Mapping[str, list[str]]:
    """Return the addresses of the tasks, keyed by the kind of task, such as ``worker``."""
    try:
        content: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from None
    if isinstance(content, dict) and "cluster" in content:
        content = content["cluster"]
    if not isinstance(content, dict):
        raise ValueError(f"{json.dumps(content)} is not an object with lists of tasks")
    for kind, addresses in content.items():
        if kind not in _KINDS:
            raise ValueError(f"{kind!r} is not a supported kind of task; remove it")
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ValueError(f"{kind!r} is {json.dumps(addresses)}, not a list of strings")
        if not addresses:
            raise ValueError(f"{kind!r} is empty")
    return content


def _task_hosts(tasks: Mapping[str, list[str]]) -> TaskHosts:
    hosts = {kind: [h for text in tasks.get(kind, ()) for h in _hosts(text)] for kind in _KINDS}
    if len(hosts["chief"]) > 1:
        raise ValueError(f"'chief' has {len(hosts['chief'])} hosts")
    workers = (*hosts["chief"], *hosts["worker"])
    if not workers:
        raise ValueError("'worker' is missing")
    return TaskHosts(workers=workers, servers=tuple(hosts["ps"]))


def _hosts(text: str) -> list[str]:
    """Return the hosts of a comma-separated list, with or without ports."""
    hosts = split_hosts(text)
    for name, port in hosts:
        if port is not None and not port.isdecimal():
            raise ValueError(f"{port!r} after {name} is not a port")
    return [name for name, _ in hosts]
