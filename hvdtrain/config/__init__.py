"""Every setting once: its name, environment variable, default, accepted values and help.

Precedence is flag, then environment, then default. The launcher turns flags into these
variables; ranks read them back here, so that both sides share one definition and no import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hvdtrain.config.fields import PREFIX, variable_name, written_default
from hvdtrain.config.groups import ModeSettings, Settings, check_in_common
from hvdtrain.errors import ConfigurationError

__all__ = [
    "COLUMNS",
    "LAUNCHER",
    "LONGEST_WORD",
    "MANAGED_HOSTS",
    "REPORT_FD",
    "ModeSettings",
    "Settings",
    "check_in_common",
    "read_settings",
    "variable_name",
    "written_default",
]

# Set for the ranks by ``hvdtrain run``: where it listens, its addresses with one port
# ("10.0.0.1 192.168.1.1 4711"); and the width of the terminal that shows their output, if any.
LAUNCHER = PREFIX + "LAUNCHER"
COLUMNS = PREFIX + "COLUMNS"
# The open file in which a rank's program tells how far it is, and its inode ("7:4711"), so that
# a number that means another file by then is not written to.
REPORT_FD = PREFIX + "REPORT_FD"
# The file in which somebody else lists the hosts of a job; see cluster/managed_hosts.py.
MANAGED_HOSTS = PREFIX + "MANAGED_HOSTS"
# A word or a line that is told through it has so many characters at most.
LONGEST_WORD = 500


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read all settings from ``environ``.

    Raises:
        ConfigurationError: A value can't be parsed, and the message names the variable, what it
            held and what it accepts; or values contradict each other.
    """
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(Settings):
        text = environ.get(variable_name(entry.name))
        if text is None:
            continue
        try:
            values[entry.name] = entry.metadata["parse"](text)
        except ValueError as error:
            name, default = variable_name(entry.name), written_default(entry)
            raise ConfigurationError(
                f"{name}={text!r} can't be used: {error}. It means: {entry.metadata['help']}. "
                f"Unset it for the default, {default}."
            ) from None
    settings = Settings(**values)
    settings.check()
    return settings
