"""The arguments of ``hvdtrain.Checkpoint``, checked."""

from __future__ import annotations

from dataclasses import dataclass

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
        whole = "a whole number above 0"
        for name, usable, expected in (
            ("every_steps", self.every_steps is None or _is_count(self.every_steps), whole),
            ("every_s", self.every_s is None or self.every_s > 0, "seconds, more than 0"),
            ("keep", _is_count(self.keep), whole),
            (
                "export",
                self.export is None or self.export.endswith(".keras"),
                "a path that ends in .keras",
            ),
            ("on_error", self.on_error in ("warn", "raise"), '"warn" or "raise"'),
        ):
            if not usable:
                raise ConfigurationError(
                    f"Checkpoint({name}={getattr(self, name)!r}): expected {expected}."
                )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0
