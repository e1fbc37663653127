"""Reads options from files: hvdtrain's TOML files, and horovodrun's YAML files."""

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

# The command line's short names.
_SHORT = {"np": "num-proc", "H": "hosts", "x": "env"}
_NOT_IN_FILES = ("config", "config-file", "help", "help-all")
_SCALARS = {str, int, float}
# Options that are on by default.
_ON = {
    entry.name.replace("_", "-") for entry in dataclasses.fields(Settings) if entry.default is True
}
# Options that may be repeated. In a file, their values are a list.
_REPEATED = {"env", "sbatch", "volume", "node-selector", "toleration", "pull-secret"}
_HOST_LISTS = {"hosts", "worker-hosts", "ps-hosts"}
# For each section, the prefix that turns its keys into names of flags.
# Source: horovod/runner/common/util/config_parser.py
_SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
}


def with_files(options: Sequence[str], folder: Path = Path()) -> list[str]:
    """Replace ``--config-file`` and ``--config`` with the options in those files.

    The options from files go first, so that the command line overrides them. Options after ``--``
    are untouched.

    The paths of files are relative to ``folder``.

    Raises:
        ConfigurationError: If a file can't be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-file", type=Path)
    parser.add_argument("--config", type=Path)
    end = list(options).index("--") if "--" in options else len(options)
    files, rest = parser.parse_known_args(options[:end])
    horovod = read_horovod_file(folder / files.config_file) if files.config_file else []
    own = read_job_file(folder / files.config) if files.config else []
    return [*horovod, *own, *rest, *options[end:]]


def read_job_file(path: Path) -> list[str]:
    """Return a TOML file's options as arguments. ``grace-s = 10`` becomes ``--grace-s=10``.

    Keys are flag names with dashes or underscores. ``true`` becomes a flag without a value.
    ``false`` is omitted, or becomes ``--no-...`` if the flag is on by default. ``hosts`` and
    repeated options may be lists, and ``env`` may be a table.

    Raises:
        ConfigurationError: If the file can't be read, is not TOML, or has an invalid key or value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config {path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigurationError(f"--config {path} is not valid TOML: {error}.") from None
    return [word for key, value in content.items() for word in _toml_arguments(path, key, value)]


def _toml_arguments(path: Path, key: str, value: Any) -> list[str]:
    name = _SHORT.get(key, key.replace("_", "-"))
    if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name) or name in _NOT_IN_FILES:
        raise ConfigurationError(
            f"--config {path}: {key!r} is not allowed in this file; use the options in hvdtrain "
            "run --help-all."
        )
    if isinstance(value, bool):
        off = [f"--no-{name}"] if name in _ON else []
        return [f"--{name}"] if value else off
    # Flag and value are one word. Otherwise argparse would mistake the value of a flag without
    # values for the program.
    if type(value) in _SCALARS:
        return [f"--{name}={value}"]
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        if name in _HOST_LISTS:
            return [f"--{name}={','.join(value)}"]
        if name in _REPEATED:
            return [f"--{name}={entry}" for entry in value]
    if isinstance(value, dict) and name == "env" and set(map(type, value.values())) <= _SCALARS:
        return [f"--{name}={variable}={text}" for variable, text in value.items()]
    raise ConfigurationError(
        f"--config {path}: {key} has an invalid value, got {value!r}; expected a string, a number "
        "or a boolean; hosts and repeated options may be lists of strings, and env a table."
    )


def read_horovod_file(path: Path) -> list[str]:
    """Return the options in horovodrun's YAML file as arguments.

    ``params: {cycle_time_ms: 5}`` becomes ``--cycle-time-ms=5``.

    Raises:
        ConfigurationError: If the file can't be read, or is not in horovodrun's format.
    """
    content = _load_yaml(path)
    if not isinstance(content, dict):
        raise _invalid(path, repr(content))
    arguments: list[str] = []
    for section, entries in content.items():
        if section == "controller" and isinstance(entries, str):
            arguments.append(f"--{entries.lower()}")
        elif section in _SECTIONS and isinstance(entries, dict):
            for key, value in entries.items():
                arguments += _horovod_arguments(path, section, str(key), value)
        elif section not in _SECTIONS or entries is not None:
            raise _invalid(path, f"{section}: {entries!r}")
    return arguments


def _load_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config-file {path} can't be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config-file {path} is not valid YAML: {error}.") from None


def _horovod_arguments(path: Path, section: str, key: str, value: Any) -> list[str]:
    prefix = _SECTIONS[section]
    name = prefix.removesuffix("-") if key == "enabled" else prefix + key.replace("_", "-")
    if value is None:
        return []
    if value is False:
        # The opposite of this flag does not begin with "--no-".
        return ["--log-without-timestamp" if name == "log-with-timestamp" else f"--no-{name}"]
    if value is True:
        return [f"--{name}"]
    if type(value) in _SCALARS:
        return [f"--{name}={value}"]
    raise _invalid(path, f"{section}: {key}: {value!r}")


def _invalid(path: Path, received: str) -> ConfigurationError:
    return ConfigurationError(
        f"--config-file {path} has an invalid entry, got {received}; expected horovodrun's "
        f"sections ({', '.join(_SECTIONS)}) with names and values. Put options of hvdtrain run "
        "into the TOML file of --config."
    )
