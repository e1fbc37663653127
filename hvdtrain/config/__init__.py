"""Settings, each with its name, environment variable, default, accepted values and help.

A flag overrides the environment variable, which overrides the default. The launcher turns flags
into variables, and ranks read them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hvdtrain.config.fields import PREFIX, variable_name, written_default
from hvdtrain.config.settings import ModeSettings, Settings, check_common_variables
from hvdtrain.errors import ConfigurationError

__all__ = [
    "COLUMNS",
    "LAUNCHER",
    "MANAGED_HOSTS",
    "MAX_TEXT_LENGTH",
    "REPORT_FD",
    "ModeSettings",
    "Settings",
    "check_common_variables",
    "read_settings",
    "variable_name",
    "written_default",
]

# hvdtrain run sets these for the ranks: the launcher's addresses and port ("10.0.0.1 192.168.1.1
# 4711"), and the width of the terminal that shows their output.
LAUNCHER = PREFIX + "LAUNCHER"
COLUMNS = PREFIX + "COLUMNS"
# The file descriptor for a rank's reports, and its inode ("7:4711"). The inode is checked because
# the program may have closed the file and reused its number.
REPORT_FD = PREFIX + "REPORT_FD"
# The file in which an external manager lists the hosts of a job; see cluster/managed_hosts.py.
MANAGED_HOSTS = PREFIX + "MANAGED_HOSTS"
# Maximum characters of a text or line in a rank's report.
MAX_TEXT_LENGTH = 500


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read all settings from the environment.

    Raises:
        ConfigurationError: If a variable is invalid, or settings contradict each other.
    """
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(Settings):
        name = variable_name(entry.name)
        if name not in environ:
            continue
        try:
            values[entry.name] = entry.metadata["parse"](environ[name])
        except ValueError as error:
            raise ConfigurationError(
                f"{name}={environ[name]!r} is invalid: {error}. Unset it for the default, "
                f"{written_default(entry)}."
            ) from None
    settings = Settings(**values)
    settings.check()
    return settings
