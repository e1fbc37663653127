"""What ``hvdtrain submit --on kubernetes`` is told of pods, beside the job."""

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
    """The option that sets a field."""

    name: str
    read: Callable[[str], Any]
    metavar: str
    help: str
    repeats: bool = False
    is_file: bool = False  # its content is kept: the file may change, or not be there any more


def _option(
    name: str, read: Callable[[str], Any], metavar: str, help: str, default: Any = "", **more: Any
) -> Any:
    flag = _Flag(name, read, metavar, help, **more)
    if default is dict:
        return field(default_factory=dict, metadata={"flag": flag})
    return field(default=default, metadata={"flag": flag})


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """The pods of a job; the help of its option describes each field."""

    image: str = _option("--image", str, "IMAGE", "what pods run; it has hvdtrain, an MPI and sshd")
    namespace: str = _option("--namespace", _name, "NAME", "default that of kubectl's context")
    context: str = _option("--context", str, "NAME", "of kubectl's configuration; default its own")
    ranks_per_pod: int = _option("--ranks-per-pod", positive_int, "N", "in each; default 1", 1)
    gpus_per_rank: int = _option("--gpus-per-rank", count, "N", "NVIDIA GPUs; default none", 0)
    resources: Mapping[str, str] = _option(
        *("--resources", _resources, "NAME=N,..."),
        "of each worker, requested and at most, as cpu=4,memory=16Gi",
        dict,
    )
    volumes: tuple[Volume, ...] = _option(
        *("--volume", _volume, "CLAIM:/PATH[:ro]"),
        "a persistent volume claim that all pods see there; may be repeated",
        (),
        repeats=True,
    )
    node_selector: Mapping[str, str] = _option(
        *("--node-selector", _pair, "LABEL=VALUE"),
        "of nodes that pods may be on; may be repeated",
        dict,
        repeats=True,
    )
    tolerations: tuple[Toleration, ...] = _option(
        *("--toleration", _toleration, "KEY[=VALUE][:EFFECT]"),
        "of a node's taint; may be repeated",
        (),
        repeats=True,
    )
    queue: str = _option("--queue", _name, "NAME", "Kueue's, in which the job waits for its turn")
    pull_secrets: tuple[str, ...] = _option(
        *("--pull-secret", _name, "NAME"),
        "with which the image is pulled; may be repeated",
        (),
        repeats=True,
    )
    service_account: str = _option(
        *("--service-account", _name, "NAME"),
        "of the launcher, which ends its workers; default one of the job's own",
    )
    folder: str = _option("--pod-folder", str, "PATH", "the working directory; default the image's")
    python: str = _option("--pod-python", str, "PATH", "with hvdtrain; default python3", "python3")
    template: Mapping[str, Any] = _option(
        *("--template", _template, "FILE"),
        "a pod as YAML, for whatever else pods need; the flags here win",
        dict,
        is_file=True,
    )

    def shared_paths(self) -> list[str]:
        """Return the folders of its pods that are on volumes and may be written."""
        containers = (self.template.get("spec") or {}).get("containers") or ()
        mounts = [mount for one in containers for mount in one.get("volumeMounts") or ()]
        given = [str(mount["mountPath"]) for mount in mounts if not mount.get("readOnly")]
        return [volume.path for volume in self.volumes if not volume.read_only] + given


# Fields and options by the names of the options.
_FLAGS: Mapping[str, tuple[dataclasses.Field[Any], _Flag]] = {
    entry.metadata["flag"].name: (entry, entry.metadata["flag"]) for entry in fields(PodOptions)
}


def add_pod_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options that are about pods; each that is said is a word in ``pod_words``."""
    for _, flag in _FLAGS.values():
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
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in _FLAGS:
            raise ConfigurationError(f"{word!r} is no option of a job on Kubernetes.")
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
