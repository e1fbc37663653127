"""The backend that Keras would choose, found without importing Keras."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["KERAS_BACKEND", "configured_backend"]

KERAS_BACKEND = "KERAS_BACKEND"
_DEFAULT = "tensorflow"


def configured_backend(environ: Mapping[str, str]) -> str:
    """Return the backend that Keras chooses when a process with this environment imports it.

    Keras reads the variable ``KERAS_BACKEND``, then ``keras.json`` in ``KERAS_HOME`` or
    ``~/.keras`` (``keras/src/backend/config.py``). The result may be an unknown name.
    """
    if backend := environ.get(KERAS_BACKEND):
        return backend
    home = environ.get("KERAS_HOME") or os.path.join(_writable_home(environ), ".keras")
    try:
        content = json.loads(Path(home, "keras.json").expanduser().read_text())
        return str(content.get("backend") or _DEFAULT)
    except (OSError, ValueError, AttributeError):
        return _DEFAULT


def _writable_home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME") or os.path.expanduser("~")
    return home if os.access(home, os.W_OK) else "/tmp"
