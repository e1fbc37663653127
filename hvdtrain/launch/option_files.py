"""Options in files instead of on the command line: hvdtrain's own TOML, and horovodrun's YAML."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError

__all__ = ["read_horovod_file", "read_job_file", "with_files"]

# Short names that people know from the command line.
_SHORT = {"np": "num-proc", "H": "hosts", "x": "env"}
_NOT_IN_FILES = ("config", "config-file", "help", "help-all")
# Types of values that stand for themselves; that of true and false is another.
_PLAIN = {str, int, float}
# What is on unless it is turned off.
_ON = {
    entry.name.replace("_", "-") for entry in dataclasses.fields(Settings) if entry.default is True
}
# Options that may be repeated; a list of texts repeats them.
_REPEATED = {"env", "sbatch", "volume", "node-selector", "toleration", "pull-secret"}
# What the flags for the keys of each section begin with.
# Source: horovod/runner/common/util/config_parser.py
_SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
}
# Where "--no-" before the flag is not its opposite.
_OPPOSITES = {"--log-with-timestamp": "--log-without-timestamp"}


def with_files(options: Sequence[str], folder: Path = Path()) -> list[str]:
    """Replace ``--config-file`` and ``--config`` by the options in those files, which come first.

    So options that were typed win, and whoever runs the job needs no file. What stands behind
    ``--`` is left alone.

    Args:
        options: The options as they were typed.
        folder: The folder that relative paths start from.

    Raises:
        ConfigurationError: A file can't be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-file", type=Path)
    parser.add_argument("--config", type=Path)
    at = list(options).index("--") if "--" in options else len(options)
    named, rest = parser.parse_known_args(options[:at])
    horovods = read_horovod_file(folder / named.config_file) if named.config_file else []
    own = read_job_file(folder / named.config) if named.config else []
    return [*horovods, *own, *rest, *options[at:]]


def read_job_file(path: Path) -> list[str]:
    """The options in the file as arguments: ``grace-s = 10`` as ``--grace-s=10``.

    Names are those of the flags, with dashes or underscores. ``true`` stands for a flag without
    a value, ``false`` for none, or for the ``--no-`` of one that is on by default; ``hosts`` and
    what may be repeated can be lists, ``env`` a table of names and values.

    Raises:
        ConfigurationError: The file can't be read, is no TOML, or holds what no flag takes.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config {path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigurationError(f"--config {path} is no TOML: {error}.") from None
    arguments: list[str] = []
    for key, value in content.items():
        arguments += _toml_arguments(path, key, value)
    return arguments


def _toml_arguments(path: Path, key: str, value: Any) -> list[str]:
    name = _SHORT.get(key, key.replace("_", "-"))
    if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name) or name in _NOT_IN_FILES:
        raise ConfigurationError(
            f"--config {path}: {key!r} can't stand there; expected options of hvdtrain run, as "
            "in its --help."
        )
    texts = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if isinstance(value, bool):
        off = [f"--no-{name}"] if name in _ON else []
        return [f"--{name}"] if value else off
    # With the value in the same word, what no flag takes can't pass for the program.
    if isinstance(value, (str, int, float)):
        return [f"--{name}={value}"]
    if texts and name in ("hosts", "worker-hosts", "ps-hosts"):
        return [f"--{name}={','.join(value)}"]
    if texts and name in _REPEATED:
        return [f"--{name}={entry}" for entry in value]
    if isinstance(value, dict) and name == "env" and set(map(type, value.values())) <= _PLAIN:
        return [f"--{name}={variable}={text}" for variable, text in value.items()]
    raise ConfigurationError(
        f"--config {path}: {key} = {value!r} can't be used; expected a text, a number, true, for "
        "hosts and what may be repeated a list of texts, or for env a table of names and values."
    )


def read_horovod_file(path: Path) -> list[str]:
    """Read the file as arguments: ``params: {cycle_time_ms: 5}`` as ``--cycle-time-ms=5``.

    Raises:
        ConfigurationError: It can't be read, or is none of horovodrun's files.
    """
    content = _load_yaml(path)
    if not isinstance(content, dict):
        raise _unusable(path, repr(content))
    arguments: list[str] = []
    for section, entries in content.items():
        if section == "controller" and isinstance(entries, str):
            arguments.append(f"--{entries.lower()}")
        elif section in _SECTIONS and isinstance(entries, dict):
            for key, value in entries.items():
                arguments += _horovod_arguments(path, section, str(key), value)
        elif section not in _SECTIONS or entries is not None:
            raise _unusable(path, f"{section}: {entries!r}")
    return arguments


def _load_yaml(path: Path) -> Any:
    import yaml  # seldom needed

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config-file {path} can't be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config-file {path} is no YAML: {error}.") from None


def _horovod_arguments(path: Path, section: str, key: str, value: Any) -> list[str]:
    prefix = _SECTIONS[section]
    name = prefix.removesuffix("-") if key == "enabled" else prefix + key.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        flag = f"--{name}"
        return [flag if value else _OPPOSITES.get(flag, f"--no-{name}")]
    if isinstance(value, (str, int, float)):
        return [f"--{name}={value}"]
    raise _unusable(path, f"{section}: {key}: {value!r}")


def _unusable(path: Path, received: str) -> ConfigurationError:
    return ConfigurationError(
        f"--config-file {path}: {received} can't be used; expected horovodrun's sections "
        f"({', '.join(_SECTIONS)}), each with names and values. Options of hvdtrain run stand in "
        "the TOML file of --config."
    )
