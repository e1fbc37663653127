"""What a user asks of checkpoints, checked."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import ConfigurationError
from hvdtrain.keras.saving.checkpoint_schedule import CheckpointSchedule

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
        self.schedule()  # for its errors
        if not isinstance(self.keep, int) or self.keep < 1:
            raise ConfigurationError(
                f"Checkpoint(keep={self.keep!r}): expected a whole number above 0."
            )
        if self.export is not None and not self.export.endswith(".keras"):
            raise ConfigurationError(
                f"Checkpoint(export={self.export!r}): expected a path that ends in .keras."
            )
        if self.on_error not in ("warn", "raise"):
            raise ConfigurationError(
                f'Checkpoint(on_error={self.on_error!r}): expected "warn" or "raise".'
            )

    def schedule(self) -> CheckpointSchedule:
        """When checkpoints are due, for a training that begins."""
        return CheckpointSchedule(self.every_steps, self.every_s)
