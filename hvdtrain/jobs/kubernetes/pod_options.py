"""The options of ``hvdtrain submit --on kubernetes`` for the pods of a job."""

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
# A DNS name, as Kubernetes requires it for objects.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class Volume:
    """A persistent volume claim and its mount path."""

    claim: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Toleration:
    """A taint that pods tolerate. An empty value or effect matches all values or effects."""

    key: str
    value: str = ""
    effect: str = ""


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
        raise ValueError("expected CLAIM:/PATH or CLAIM:/PATH:ro")
    return Volume(claim, path, mode == "ro")


def _toleration(text: str) -> Toleration:
    rest, _, effect = text.partition(":")
    key, _, value = rest.partition("=")
    if effect not in ("", *_EFFECTS):
        raise ValueError(f"expected one of {', '.join(_EFFECTS)} after the colon")
    return Toleration(key, value, effect)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("expected a Kubernetes name: lower-case letters, digits and hyphens")
    return text


def _template(text: str) -> Mapping[str, Any]:
    """Read a pod template from a YAML file, or from the JSON that ``_checked_word`` returned."""
    try:
        is_json = text.startswith("{")
        content = yaml.safe_load(text if is_json else Path(text).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"expected a pod as YAML: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("spec"), dict):
        raise ValueError("expected a pod as YAML: a mapping with a spec")
    return content


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """The options for a job's pods. The help texts in ``_OPTIONS`` describe each field."""

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
        """Return the writable mount paths of volumes in the pods."""
        containers = (self.template.get("spec") or {}).get("containers") or ()
        mounts = [mount for one in containers for mount in one.get("volumeMounts") or ()]
        writable = [str(mount["mountPath"]) for mount in mounts if not mount.get("readOnly")]
        return [volume.path for volume in self.volumes if not volume.read_only] + writable


class _Option(NamedTuple):
    """The option of a field of ``PodOptions``, which collects all values if it ``repeats``."""

    name: str
    field: str
    read: Callable[[str], Any]
    metavar: str
    help: str
    repeats: bool = False


_OPTIONS = (
    _Option("--image", "image", str, "IMAGE", "container image with hvdtrain, an MPI and sshd"),
    _Option(
        "--namespace", "namespace", _name, "NAME", "namespace; default: as in the kubectl context"
    ),
    _Option("--context", "context", str, "NAME", "kubectl context; default the current one"),
    _Option("--ranks-per-pod", "ranks_per_pod", positive_int, "N", "ranks per worker; default 1"),
    _Option("--gpus-per-rank", "gpus_per_rank", count, "N", "NVIDIA GPUs per rank; default 0"),
    _Option(
        *("--resources", "resources", _resources, "NAME=N,..."),
        "requests and limits of each worker, such as cpu=4,memory=16Gi",
    ),
    _Option(
        *("--volume", "volumes", _volume, "CLAIM:/PATH[:ro]"),
        *("persistent volume claim to mount in all pods; may be repeated", True),
    ),
    _Option(
        *("--node-selector", "node_selector", _pair, "LABEL=VALUE"),
        *("label of the nodes to run on; may be repeated", True),
    ),
    _Option(
        *("--toleration", "tolerations", _toleration, "KEY[=VALUE][:EFFECT]"),
        *("taint to tolerate; may be repeated", True),
    ),
    _Option("--queue", "queue", _name, "NAME", "Kueue queue to wait in"),
    _Option(
        *("--pull-secret", "pull_secrets", _name, "NAME"),
        *("secret for pulling the image; may be repeated", True),
    ),
    _Option(
        *("--service-account", "service_account", _name, "NAME"),
        "service account of the launcher; default a new one for the job",
    ),
    _Option(
        *("--pod-folder", "folder", str, "PATH"),
        "working directory in the pods; default the image's",
    ),
    _Option(
        *("--pod-python", "python", str, "PATH"),
        "Python with hvdtrain in the pods; default python3",
    ),
    _Option(
        *("--template", "template", _template, "FILE"),
        "YAML file of a pod for other settings; options given here override it",
    ),
)


def add_pod_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options for pods, which ``pod_words`` collects as ``--name=value``."""
    for option in _OPTIONS:
        parser.add_argument(
            option.name,
            dest="pod_words",
            action="append",
            metavar=option.metavar,
            help=option.help,
            type=argument(functools.partial(_checked_word, option)),
        )


def _checked_word(option: _Option, text: str) -> str:
    value = option.read(text)
    # The content of the file is kept because the file may change.
    return f"{option.name}={json.dumps(value, default=str) if option.read is _template else text}"


def read_pod_options(words: Iterable[str]) -> PodOptions:
    """Parse the words that ``add_pod_options`` collects.

    If an option that can't be repeated is given several times, the last value is used.

    Raises:
        ConfigurationError: If a word is not valid, or no image is given.
    """
    options = {option.name: option for option in _OPTIONS}
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if (option := options.get(name)) is None:
            raise ConfigurationError(f"{word!r} is not an option of jobs on Kubernetes.")
        try:
            value = option.read(text)
        except ValueError as error:
            raise ConfigurationError(f"{name}: got {text!r}: {error}.") from None
        values[option.field] = (*values.get(option.field, ()), value) if option.repeats else value
    if "image" not in values:
        raise ConfigurationError(
            "a job on Kubernetes needs --image: a container image with hvdtrain, an MPI and sshd."
        )
    if "node_selector" in values:
        values["node_selector"] = dict(values["node_selector"])
    return PodOptions(**values)
