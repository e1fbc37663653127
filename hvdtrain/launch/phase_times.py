"""The time of an attempt in parts: its phases, and what ranks wait for while they train."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from hvdtrain.agent.rank_report import RankReport

__all__ = ["PhaseTimes", "TrainingWaits"]

# What phases are called in a summary; those that a program of the user's makes up are "other".
_KINDS = {
    "": "start",
    "starting MPI": "start",
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
    """Adds up the phases that a chief reports; times are the caller's clock.

    Args:
        began: When the attempt did.
    """

    def __init__(self, began: float) -> None:
        self._seconds: dict[str, float] = {}
        self._kind = "start"
        self._since = began

    def note(self, phase: str, now: float) -> None:
        """Note that the chief is in a phase now."""
        kind = _KINDS.get(phase, "other")
        if kind != self._kind:
            self._add(now)
            self._kind = kind

    def seconds(self, now: float) -> Mapping[str, float]:
        """Return how long each has taken up to now: start, training, validation, ..., other."""
        self._add(now)
        return dict(self._seconds)

    def _add(self, now: float) -> None:
        self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + now - self._since
        self._since = now


class TrainingWaits:
    """Adds up what ranks have waited while they trained: for each other, and for their input."""

    def __init__(self) -> None:
        self._for_others: dict[int, float] = {}
        self._for_input: dict[int, float] = {}

    def note(self, rank: int, before: RankReport, now: RankReport) -> None:
        """Take in a rank's report, given the one before it.

        Ranks report each change of phase at once, so what they waited in between belongs to the
        phase in which they were ``before``.
        """
        if _KINDS.get(before.phase) != "training":
            return
        for seconds, ended_s, began_s in (
            (self._for_others, now.waited_s, before.waited_s),
            (self._for_input, now.input_s, before.input_s),
        ):
            if ended_s is not None:
                more_s = max(0.0, ended_s - (began_s or 0.0))
                seconds[rank] = seconds.get(rank, 0.0) + more_s

    def shares(self, training_s: float) -> tuple[float | None, float | None]:
        """The parts of so much training that ranks waited for others, and for their input.

        On the average of those that tell it; None for unknown. The two are 1 together at most.
        """
        for_others = _share(self._for_others, training_s)
        for_input = _share(self._for_input, training_s)
        if for_input is not None:
            for_input = min(for_input, 1.0 - (for_others or 0.0))
        return for_others, for_input


def _share(seconds: Mapping[int, float], training_s: float) -> float | None:
    if training_s <= 0 or not any(seconds.values()):
        return None
    return min(1.0, statistics.fmean(seconds.values()) / training_s)
