"""The options of ``hvdtrain submit --on kubernetes`` for the pods of a job."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
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
    """A taint that pods tolerate; an empty value or effect matches all."""

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
    """Read a pod from a file, or from the JSON that was kept of one."""
    try:
        is_json = text.startswith("{")
        content = yaml.safe_load(text if is_json else Path(text).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"expected a pod as YAML: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("spec"), dict):
        raise ValueError("expected a pod as YAML: a mapping with a spec")
    return content


class _Flag(NamedTuple):
    """The command-line option of a field."""

    name: str
    read: Callable[[str], Any]
    metavar: str
    help: str
    repeats: bool = False


def _option(
    name: str,
    read: Callable[[str], Any],
    metavar: str,
    help: str,
    default: Any = "",
    *,
    repeats: bool = False,
) -> Any:
    flag = _Flag(name, read, metavar, help, repeats)
    return field(default_factory=lambda: default, metadata={"flag": flag})


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """The pods of a job; the help of its option describes each field."""

    image: str = _option("--image", str, "IMAGE", "container image with hvdtrain, an MPI and sshd")
    namespace: str = _option(
        "--namespace", _name, "NAME", "namespace; default that of the kubectl context"
    )
    context: str = _option("--context", str, "NAME", "kubectl context; default the current one")
    ranks_per_pod: int = _option(
        "--ranks-per-pod", positive_int, "N", "ranks in each worker; default 1", 1
    )
    gpus_per_rank: int = _option(
        "--gpus-per-rank", count, "N", "NVIDIA GPUs of each rank; default 0", 0
    )
    resources: Mapping[str, str] = _option(
        *("--resources", _resources, "NAME=N,..."),
        "requests and limits of each worker, such as cpu=4,memory=16Gi",
        {},
    )
    volumes: tuple[Volume, ...] = _option(
        *("--volume", _volume, "CLAIM:/PATH[:ro]"),
        "mount a persistent volume claim in all pods; may be repeated",
        (),
        repeats=True,
    )
    node_selector: Mapping[str, str] = _option(
        *("--node-selector", _pair, "LABEL=VALUE"),
        "label of the nodes to run on; may be repeated",
        {},
        repeats=True,
    )
    tolerations: tuple[Toleration, ...] = _option(
        *("--toleration", _toleration, "KEY[=VALUE][:EFFECT]"),
        "taint to tolerate; may be repeated",
        (),
        repeats=True,
    )
    queue: str = _option("--queue", _name, "NAME", "Kueue queue to wait in")
    pull_secrets: tuple[str, ...] = _option(
        *("--pull-secret", _name, "NAME"),
        "secret for pulling the image; may be repeated",
        (),
        repeats=True,
    )
    service_account: str = _option(
        *("--service-account", _name, "NAME"),
        "service account of the launcher; default a new one for the job",
    )
    folder: str = _option(
        "--pod-folder", str, "PATH", "working directory in the pods; default that of the image"
    )
    python: str = _option(
        *("--pod-python", str, "PATH"),
        "Python in the pods that has hvdtrain; default python3",
        "python3",
    )
    template: Mapping[str, Any] = _option(
        *("--template", _template, "FILE"),
        "YAML file of a pod for other settings; options given here override it",
        {},
    )

    def shared_paths(self) -> list[str]:
        """Return the writable mount paths of volumes in the pods."""
        containers = (self.template.get("spec") or {}).get("containers") or ()
        mounts = [mount for one in containers for mount in one.get("volumeMounts") or ()]
        writable = [str(mount["mountPath"]) for mount in mounts if not mount.get("readOnly")]
        return [volume.path for volume in self.volumes if not volume.read_only] + writable


# Fields and flags by the name of the option.
_FLAGS: Mapping[str, tuple[dataclasses.Field[Any], _Flag]] = {
    entry.metadata["flag"].name: (entry, entry.metadata["flag"]) for entry in fields(PodOptions)
}


def add_pod_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options for pods; ``pod_words`` collects the given ones as ``--name=value``."""
    for _, flag in _FLAGS.values():
        parser.add_argument(
            flag.name,
            dest="pod_words",
            action="append",
            metavar=flag.metavar,
            help=flag.help,
            type=argument(functools.partial(_checked_word, flag)),
        )


def _checked_word(flag: _Flag, text: str) -> str:
    value = flag.read(text)
    # The content of the file is kept, as it may change.
    return f"{flag.name}={json.dumps(value, default=str) if flag.read is _template else text}"


def read_pod_options(words: Iterable[str]) -> PodOptions:
    """Parse the words of ``add_pod_options``; the last value of an option that can't repeat wins.

    Raises:
        ConfigurationError: A word is not valid, or there is no image.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in _FLAGS:
            raise ConfigurationError(f"{word!r} is not an option of jobs on Kubernetes.")
        entry, flag = _FLAGS[name]
        try:
            value = flag.read(text)
        except ValueError as error:
            raise ConfigurationError(f"{name}: got {text!r}: {error}.") from None
        values[entry.name] = (*values.get(entry.name, ()), value) if flag.repeats else value
    if "image" not in values:
        raise ConfigurationError(
            "a job on Kubernetes needs --image: a container image with hvdtrain, an MPI and sshd."
        )
    if "node_selector" in values:
        values["node_selector"] = dict(values["node_selector"])
    return PodOptions(**values)
