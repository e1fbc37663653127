"""What became of the gradients that workers sent, and how stale they were."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["StalenessStats"]


@dataclass(kw_only=True)
class StalenessStats:
    """Of one server.

    Attributes:
        pushed: Gradients that came, by the worker's rank.
        taken: Gradients that went into an update.
        late: Gradients that came after their step.
        updates: Of the variables.
        staleness: How many updates had how much of it: the updates between the weights that a
            gradient was computed with and those that it was applied to.
    """

    pushed: Counter[int] = field(default_factory=Counter)
    taken: int = 0
    late: int = 0
    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def update(self, staleness: int) -> None:
        """Note an update."""
        self.updates += 1
        self.staleness[staleness] += 1

    @property
    def mean_staleness(self) -> float:
        """Over all updates; 0 without any."""
        total = sum(stale * count for stale, count in self.staleness.items())
        return total / max(1, self.updates)

    def percentile_of_staleness(self, percent: float) -> int:
        """The least staleness that so many percent of all updates don't exceed."""
        left = percent / 100 * self.updates
        for stale in sorted(self.staleness):
            left -= self.staleness[stale]
            if left <= 0:
                return stale
        return 0

    def to_json(self) -> dict[str, Any]:
        """For other ranks."""
        return {
            "pushed": [list(entry) for entry in sorted(self.pushed.items())],
            "taken": self.taken,
            "late": self.late,
            "updates": self.updates,
            "staleness": [list(entry) for entry in sorted(self.staleness.items())],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StalenessStats:
        """From ``to_json``."""
        counters = {name: Counter(dict(value[name])) for name in ("pushed", "staleness")}
        return cls(**{**value, **counters})
