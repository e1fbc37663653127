"""Names that the client and the programs in a job's pods must agree on."""

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
# An annotation that stops a running Job: "now", or after a checkpoint ("save").
STOP = "hvdtrain/stop"
SSH_PORT = 2222
# The mount paths of the hostfile and of the keys, and the folder of the launcher's private key.
FOLDER = "/etc/hvdtrain"
KEYS_FOLDER = "/etc/hvdtrain-keys"
SSH_FOLDER = "/tmp/hvdtrain-ssh"

Object = dict[str, Any]


def plural(kind: str) -> str:
    """Return the resource name of a kind, used in paths and permissions: ``pods`` for ``Pod``."""
    return f"{kind.lower()}s"


def resource_of(one: Object) -> tuple[str, str]:
    """Return the resource name and the API group of an object. The core group's name is empty."""
    group, _, _ = one["apiVersion"].rpartition("/")
    return plural(one["kind"]), group


def rights_text(rights: Iterable[tuple[str, str, str]]) -> str:
    """Format verbs, resources and API groups: ``create jobs.batch, pods; get pods/log``."""
    resources: dict[str, list[str]] = {}
    for verb, resource, group in rights:
        name, slash, part = resource.partition("/")
        resources.setdefault(verb, []).append(f"{name}{group and '.'}{group}{slash}{part}")
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in resources.items())


def launcher_host(name: str) -> str:
    """Return the hostname of a job's launcher, which is also the name of the launcher's Service."""
    return f"{name}-launcher"


def worker_addresses(name: str, workers: int) -> dict[str, str]:
    """Return the hostnames of a job's workers, keyed by the names of their pods."""
    pods = [f"{name}-worker-{number}" for number in range(workers)]
    return {pod: f"{pod}.{name}" for pod in pods}
