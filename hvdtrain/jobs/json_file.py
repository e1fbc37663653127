"""Files of one JSON object, which are replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_json"]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put a file in place of what is there, as a whole or not at all.

    Raises:
        OSError: It can't be written; what was there stands.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o600), "w", encoding="ascii") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
