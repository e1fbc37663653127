"""The arguments of ``hvdtrain.Checkpoint``, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from hvdtrain.errors import ConfigurationError

__all__ = ["CheckpointOptions"]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The arguments of ``hvdtrain.Checkpoint``, which says what they mean.

    Raises:
        ConfigurationError: One of them can't be used.
    """

    directory: str
    every_steps: int | None
    every_s: float | None
    keep: int
    export: str | None
    on_error: str

    def __post_init__(self) -> None:
        every_steps, every_s = self.every_steps, self.every_s
        whole = "a whole number above 0"
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            self._refuse("every_steps", whole)
        if every_s is not None and not every_s > 0:
            self._refuse("every_s", "seconds, more than 0")
        if not isinstance(self.keep, int) or self.keep < 1:
            self._refuse("keep", whole)
        if self.export is not None and not self.export.endswith(".keras"):
            self._refuse("export", "a path that ends in .keras")
        if self.on_error not in ("warn", "raise"):
            self._refuse("on_error", '"warn" or "raise"')

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise ConfigurationError(
            f"Checkpoint({name}={getattr(self, name)!r}): expected {expected}."
        )
