"""Names that the client shares with the programs in a job's pods; pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "FOLDER",
    "JOB_LABEL",
    "KEYS_FOLDER",
    "ROLE_LABEL",
    "SSH_FOLDER",
    "SSH_PORT",
    "STOP",
    "Object",
    "launcher_host",
    "plural",
    "resource_of",
    "rights_text",
    "worker_addresses",
]

JOB_LABEL = "hvdtrain/job"
ROLE_LABEL = "hvdtrain/role"
# An annotation of a running Job: stop "now", or after a checkpoint ("save").
STOP = "hvdtrain/stop"
SSH_PORT = 2222
# Mount paths of the hostfile and of the keys, and the launcher's private copy of its key.
FOLDER = "/etc/hvdtrain"
KEYS_FOLDER = "/etc/hvdtrain-keys"
SSH_FOLDER = "/tmp/hvdtrain-ssh"

Object = dict[str, Any]


def plural(kind: str) -> str:
    """Return the resource of a kind, as used in paths and rights."""
    return f"{kind.lower()}s"


def resource_of(one: Object) -> tuple[str, str]:
    """Return the resource and the API group of an object; the core group is empty."""
    group, _, _ = one["apiVersion"].rpartition("/")
    return plural(one["kind"]), group


def rights_text(rights: Iterable[tuple[str, str, str]]) -> str:
    """Format rights (verb, resource, API group) as ``create jobs.batch, pods; get pods/log``."""
    resources: dict[str, list[str]] = {}
    for verb, resource, group in rights:
        name, slash, part = resource.partition("/")
        resources.setdefault(verb, []).append(f"{name}{group and '.'}{group}{slash}{part}")
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in resources.items())


def launcher_host(name: str) -> str:
    """Return the hostname of a job's launcher, and the name of its Service."""
    return f"{name}-launcher"


def worker_addresses(name: str, workers: int) -> dict[str, str]:
    """Return the hostnames of a job's workers by pod."""
    pods = [f"{name}-worker-{number}" for number in range(workers)]
    return {pod: f"{pod}.{name}" for pod in pods}
