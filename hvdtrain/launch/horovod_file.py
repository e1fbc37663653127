"""The YAML file of ``horovodrun --config-file``, read as flags of horovodrun's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigurationError

__all__ = ["read_horovod_file"]

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


def read_horovod_file(path: Path) -> list[str]:
    """What the file says as arguments: ``params: {cycle_time_ms: 5}`` as ``--cycle-time-ms=5``.

    Raises:
        ConfigurationError: It can't be read, or is none of horovodrun's files.
    """
    content = _load(path)
    if not isinstance(content, dict):
        raise _unusable(path, repr(content))
    arguments: list[str] = []
    for section, entries in content.items():
        if section == "controller" and isinstance(entries, str):
            arguments.append(f"--{entries.lower()}")
        elif section in _SECTIONS and isinstance(entries, dict):
            for key, value in entries.items():
                arguments += _arguments(path, section, str(key), value)
        elif section not in _SECTIONS or entries is not None:
            raise _unusable(path, f"{section}: {entries!r}")
    return arguments


def _load(path: Path) -> Any:
    import yaml  # seldom needed

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config-file {path} can't be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config-file {path} is no YAML: {error}.") from None


def _arguments(path: Path, section: str, key: str, value: Any) -> list[str]:
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
