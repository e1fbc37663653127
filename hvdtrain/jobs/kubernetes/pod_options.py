"""What ``hvdtrain submit --on kubernetes`` is told of pods, beside the job."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hvdtrain.config.fields import argument, count, positive_int
from hvdtrain.errors import ConfigurationError

__all__ = ["PodOptions", "Toleration", "Volume", "add_pod_options", "read_pod_options"]

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
# What Kubernetes takes as the name of an object: a label of DNS.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class Volume:
    """A persistent volume claim, and where pods see it."""

    claim: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Toleration:
    """A taint that pods may be placed in spite of; empty values stand for all."""

    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """What pods are to be.

    Attributes:
        image: What their containers are started from; it has hvdtrain, an MPI and sshd.
        namespace: Where they are; empty for that of the context.
        context: Which cluster, as kubectl's configuration names it; empty for the current one.
        ranks_per_pod: So many in each worker, as far as there are so many.
        gpus_per_rank: NVIDIA GPUs of each rank.
        resources: What each worker asks for and may have, as ``cpu: 4``.
        volumes: Claims that all pods see.
        node_selector: Labels that their nodes have.
        tolerations: Taints that their nodes may have.
        queue: Kueue's queue; empty for none.
        pull_secrets: Names of secrets with which the image may be pulled.
        service_account: Whose rights the launcher has; empty for one of the job's own.
        folder: The working directory; empty for the image's.
        python: The Python of the image that has hvdtrain.
        template: A pod, as YAML has it, into which all of this is put.
    """

    image: str
    namespace: str = ""
    context: str = ""
    ranks_per_pod: int = 1
    gpus_per_rank: int = 0
    resources: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    queue: str = ""
    pull_secrets: tuple[str, ...] = ()
    service_account: str = ""
    folder: str = ""
    python: str = "python3"
    template: Mapping[str, Any] = field(default_factory=dict)

    def shared_paths(self) -> list[str]:
        """Where its pods have what others see as well, and may write there."""
        containers = (self.template.get("spec") or {}).get("containers") or ()
        mounts = [mount for one in containers for mount in one.get("volumeMounts") or ()]
        given = [str(mount["mountPath"]) for mount in mounts if not mount.get("readOnly")]
        return [volume.path for volume in self.volumes if not volume.read_only] + given


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError("expected NAME=VALUE")
    return name, value


def _resources(text: str) -> dict[str, str]:
    return dict(_pair(part) for part in text.split(","))


def _volume(text: str) -> Volume:
    claim, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not _NAME.fullmatch(claim) or not path.startswith("/") or mode not in ("", "ro"):
        raise ValueError("expected CLAIM:/PATH, and behind it :ro where pods may only read")
    return Volume(claim, path, mode == "ro")


def _toleration(text: str) -> Toleration:
    rest, _, effect = text.partition(":")
    key, _, value = rest.partition("=")
    if effect not in ("", *_EFFECTS):
        raise ValueError(f"expected one of {', '.join(_EFFECTS)} behind the colon")
    return Toleration(key, value, effect)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("expected a name that Kubernetes takes: small letters, digits and -")
    return text


def _template(text: str) -> Mapping[str, Any]:
    """Read a pod from a file, or from what was kept of one."""
    try:
        is_kept = text.startswith("{")
        content = yaml.safe_load(text if is_kept else Path(text).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"expected a pod as YAML: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("spec"), dict):
        raise ValueError("expected a pod as YAML, which is a mapping with a spec")
    return content


class _Flag(NamedTuple):
    """An option: its name and the field that it sets, how it is read, and what is said of it."""

    name: str
    field: str
    read: Callable[[str], Any]
    metavar: str
    help: str
    repeats: bool = False
    is_file: bool = False  # whose content is kept: it may change, or not be there any more


_FLAGS = (
    _Flag("--image", "image", str, "IMAGE", "what pods run; it has hvdtrain, an MPI and sshd"),
    _Flag("--namespace", "namespace", _name, "NAME", "default that of kubectl's context"),
    _Flag("--context", "context", str, "NAME", "of kubectl's configuration; default its own"),
    _Flag("--ranks-per-pod", "ranks_per_pod", positive_int, "N", "in each worker; default 1"),
    _Flag("--gpus-per-rank", "gpus_per_rank", count, "N", "NVIDIA GPUs; default none"),
    _Flag(
        *("--resources", "resources", _resources, "NAME=N,..."),
        "of each worker, requested and at most, as cpu=4,memory=16Gi",
    ),
    _Flag(
        *("--volume", "volumes", _volume, "CLAIM:/PATH[:ro]"),
        "a persistent volume claim that all pods see there; may be repeated",
        repeats=True,
    ),
    _Flag(
        *("--node-selector", "node_selector", _pair, "LABEL=VALUE"),
        "of nodes that pods may be on; may be repeated",
        repeats=True,
    ),
    _Flag(
        *("--toleration", "tolerations", _toleration, "KEY[=VALUE][:EFFECT]"),
        "of a node's taint; may be repeated",
        repeats=True,
    ),
    _Flag("--queue", "queue", _name, "NAME", "Kueue's, in which the job waits for its turn"),
    _Flag(
        *("--pull-secret", "pull_secrets", _name, "NAME"),
        "with which the image is pulled; may be repeated",
        repeats=True,
    ),
    _Flag(
        *("--service-account", "service_account", _name, "NAME"),
        "of the launcher, which ends its workers; default one of the job's own",
    ),
    _Flag("--pod-folder", "folder", str, "PATH", "the working directory; default the image's"),
    _Flag("--pod-python", "python", str, "PATH", "that has hvdtrain; default python3"),
    _Flag(
        *("--template", "template", _template, "FILE"),
        "a pod as YAML, for whatever else pods need; the flags here win",
        is_file=True,
    ),
)


def add_pod_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options that are about pods; each that is said is a word in ``pod_words``."""
    for flag in _FLAGS:
        parser.add_argument(
            flag.name,
            dest="pod_words",
            action="append",
            metavar=flag.metavar,
            help=flag.help,
            type=argument(functools.partial(_keep, flag)),
        )


def _keep(flag: _Flag, text: str) -> str:
    """The option as one word, if it can be read."""
    value = flag.read(text)
    return f"{flag.name}={json.dumps(value, default=str) if flag.is_file else text}"


def read_pod_options(words: Iterable[str]) -> PodOptions:
    """Read the words that ``add_pod_options`` keeps; of what does not repeat the last one wins.

    Raises:
        ConfigurationError: One of them can't be read any more, or there is no image.
    """
    flags = {flag.name: flag for flag in _FLAGS}
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in flags:
            raise ConfigurationError(f"{word!r} is no option of a job on Kubernetes.")
        flag = flags[name]
        try:
            value = flag.read(text)
        except ValueError as error:
            raise ConfigurationError(f"{name}: got {text!r}: {error}.") from None
        values[flag.field] = (*values.get(flag.field, ()), value) if flag.repeats else value
    if "image" not in values:
        raise ConfigurationError(
            "a job on Kubernetes needs --image: a container image with hvdtrain, an MPI and sshd."
        )
    if "node_selector" in values:
        values["node_selector"] = dict(values["node_selector"])
    return PodOptions(**values)
