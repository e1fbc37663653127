"""Modules whose names are loaded when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_names", "names_of"]


def lazy_names(
    module: str, homes: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a module.

    Args:
        module: Its name.
        homes: Its names by the modules that they come from.
        submodules: Modules below it that are names of it, too.
    """
    home = {name: source for source, names in homes.items() for name in names}
    everything = sorted([*home, *submodules])

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: everything, everything


def names_of(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module that stands for another one.

    Args:
        module: The other one's name.
    """
    return (
        lambda name: getattr(importlib.import_module(module), name),
        lambda: dir(importlib.import_module(module)),
    )
