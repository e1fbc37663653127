"""The same as ``hvdtrain.keras.elastic``, where Horovod has it, too."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("hvdtrain.keras.elastic"), name)


def __dir__() -> list[str]:
    return dir(importlib.import_module("hvdtrain.keras.elastic"))
