"""A job's options in a TOML file instead of on the command line."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError

__all__ = ["read_jobfile"]

# Short names that people know from the command line.
_SHORT = {"np": "num-proc", "H": "hosts", "x": "env"}
# What is on unless it is turned off.
_ON = {
    entry.name.replace("_", "-") for entry in dataclasses.fields(Settings) if entry.default is True
}


def read_jobfile(path: Path) -> list[str]:
    """The options in the file as arguments: ``grace-s = 10`` as ``--grace-s=10``.

    Names are those of the flags, with dashes or underscores. ``true`` stands for a flag without
    a value, ``false`` for none, or for the ``--no-`` of one that is on by default; ``hosts`` may
    be a list, ``env`` a list or a table of names and values.

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
        arguments += _arguments(path, key, value)
    return arguments


def _arguments(path: Path, key: str, value: Any) -> list[str]:
    name = _SHORT.get(key, key.replace("_", "-"))
    if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name) or name in ("config", "config-file", "help"):
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
    if texts and name == "env":
        return [f"--{name}={entry}" for entry in value]
    if isinstance(value, dict) and name == "env" and all(map(_is_plain, value.values())):
        return [f"--{name}={variable}={text}" for variable, text in value.items()]
    raise ConfigurationError(
        f"--config {path}: {key} = {value!r} can't be used; expected a text, a number, true, for "
        "hosts a list of texts, or for env a table of names and values."
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)
