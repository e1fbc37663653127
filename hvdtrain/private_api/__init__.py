"""All that hvdtrain uses of other packages and that is not their public API, a module for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["lacks", "missing_hooks"]


def lacks(library: str, version: str, seen: tuple[str, str], what: str) -> str:
    """Return the text of an error: what a library lacks, and which versions have it."""
    oldest, newest = seen
    return (
        f"{library} {version} lacks {what}, which hvdtrain needs. It was tested with {library} "
        f"{oldest} to {newest}: pip install '{library.lower()}>={oldest},<={newest}.99'."
    )


def missing_hooks(hooks: Mapping[Any, tuple[str, ...]]) -> list[str]:
    """The names that classes and modules lack of those that are used of each."""
    return [
        f"{kind.__name__}.{name}"
        for kind, names in hooks.items()
        for name in names
        if not hasattr(kind, name)
    ]
