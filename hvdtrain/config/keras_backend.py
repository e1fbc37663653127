"""The backend that Keras would choose, found without importing Keras."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["KERAS_BACKEND", "configured_backend", "find_backend"]

KERAS_BACKEND = "KERAS_BACKEND"
_DEFAULT = "tensorflow"


def configured_backend(environ: Mapping[str, str]) -> str:
    """Return the first result of ``find_backend``."""
    return find_backend(environ)[0]


def find_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the backend that Keras chooses when a process imports it, and what selects it.

    Keras reads the variable ``KERAS_BACKEND``, then ``keras.json`` in ``KERAS_HOME`` or
    ``~/.keras`` (``keras/src/backend/config.py``). The backend may be an unknown name.
    """
    if backend := environ.get(KERAS_BACKEND):
        return backend, KERAS_BACKEND
    home = environ.get("KERAS_HOME") or os.path.join(_writable_home(environ), ".keras")
    path = Path(home, "keras.json").expanduser()
    try:
        if backend := json.loads(path.read_text()).get("backend"):
            return str(backend), str(path)
    except (OSError, ValueError, AttributeError):
        pass
    return _DEFAULT, "Keras' default"


def _writable_home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME") or os.path.expanduser("~")
    return home if os.access(home, os.W_OK) else "/tmp"
