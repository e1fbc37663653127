"""TensorFlow's information, which is the same from every rank and buries what matters.

``TF_CPP_MIN_LOG_LEVEL`` hides it, but for what its libraries say while they are loaded, before they
have read the level. That part the console leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["LEVEL", "WITHOUT_INFORMATION", "is_information", "is_unwanted"]

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
WITHOUT_INFORMATION = "1"
# Abseil's lines as long as nobody has set up its log: with a date of zeros, like "I0000
# 00:00:1795552261.046417   17820 port.cc:153] oneDNN custom operations are on."; and what it says
# before the first of them, whatever that is.
_EARLY = re.compile(
    r"I0000 00:00:\d+\.\d+ +\d+ \S+:\d+\] "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
)


def is_unwanted(environ: Mapping[str, str]) -> bool:
    """Whether ranks with ``environ`` are not to show TensorFlow's information."""
    level = environ.get(LEVEL, WITHOUT_INFORMATION)
    return level.isdecimal() and int(level) >= int(WITHOUT_INFORMATION)


def is_information(line: str) -> bool:
    """Whether ``line`` of stderr is such that the level could not hide."""
    return _EARLY.match(line) is not None
