"""Helps modules to import their public names from other modules on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_names", "names_of"]


def lazy_names(
    module: str, homes: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a module.

    Args:
        module: Name of the module.
        homes: Maps the name of each module that defines public names to these names.
        submodules: Submodules that the module also offers.
    """
    home = {name: source for source, names in homes.items() for name in names}
    public = sorted([*home, *submodules])

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: public, public


def names_of(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` that offer all names of ``module``."""
    return (
        lambda name: getattr(importlib.import_module(module), name),
        lambda: dir(importlib.import_module(module)),
    )
