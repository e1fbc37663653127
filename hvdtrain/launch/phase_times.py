"""Where the time of an attempt goes, by the phases that its chief reports."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PhaseTimes"]

# What phases are called in a summary; those that a program of the user's makes up are "other".
_KINDS = {
    "": "start",
    "started": "start",
    "compiling": "start",
    "training": "training",
    "end of an epoch": "training",
    "validation": "validation",
    "prediction": "validation",
    "checkpoint": "checkpoints",
    "serving": "training",
    "after fit": "end",
}


class PhaseTimes:
    """Adds up phases; times are the caller's clock.

    Args:
        began: When the attempt did.
    """

    def __init__(self, began: float) -> None:
        self._seconds: dict[str, float] = {}
        self._kind = "start"
        self._since = began

    def note(self, phase: str, now: float) -> None:
        """The chief is in a phase now."""
        kind = _KINDS.get(phase, "other")
        if kind != self._kind:
            self._add(now)
            self._kind = kind

    def seconds(self, now: float) -> Mapping[str, float]:
        """How long each has taken up to now: start, training, validation, ..., other."""
        self._add(now)
        return dict(self._seconds)

    def _add(self, now: float) -> None:
        self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + now - self._since
        self._since = now
