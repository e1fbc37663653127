"""Access to private API of other packages, with one module for each package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import HvdtrainError

__all__ = ["PrivateApi"]


@dataclass(frozen=True, kw_only=True)
class PrivateApi:
    """The private API of an installed library."""

    library: str  # name of the library
    version: str  # installed version
    # oldest and newest minor version with which hvdtrain's tests have passed
    tested: tuple[str, str]
    # class of the exception that is raised if a part of the API is missing
    error: type[HvdtrainError]

    def missing(self, names: object) -> HvdtrainError:
        """Return an exception that lists the names of missing attributes."""
        oldest, newest = self.tested
        return self.error(
            f"{self.library} {self.version} lacks {names}, which hvdtrain needs; install a version "
            f"that hvdtrain was tested with: "
            f"pip install '{self.library.lower()}>={oldest},<={newest}.99'."
        )

    def get(self, holder: Any, name: str) -> Any:
        """Return a private attribute. If it is missing, raise an error with its name."""
        try:
            return getattr(holder, name)
        except AttributeError:
            raise self.missing(f"{type(holder).__name__}.{name}") from None

    def check(self, hooks: Mapping[Any, tuple[str, ...]]) -> None:
        """Raise an error if an attribute that hvdtrain needs is missing.

        ``hooks`` contains, for each class, module or object, the names of the attributes that it
        must have.
        """
        missing = [
            f"{getattr(holder, '__name__', type(holder).__name__)}.{name}"
            for holder, names in hooks.items()
            for name in names
            if not hasattr(holder, name)
        ]
        if missing:
            raise self.missing(", ".join(missing))
