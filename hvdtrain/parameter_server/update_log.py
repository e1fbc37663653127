"""What became of the gradients that workers sent: counted, and written down update by update."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.monitor.journal import Journal

__all__ = ["Origin", "StalenessStats", "UpdateLog"]


class Origin(NamedTuple):
    """Where a gradient comes from.

    Attributes:
        worker: The rank that sent it.
        step: Which of that worker's pushes it is, from 0; the same on all servers.
        version: How many updates went into the weights that it was computed with.
        weight: How much it counts beside others of the same update.
    """

    worker: int
    step: int
    version: int
    weight: float


@dataclass(kw_only=True)
class StalenessStats:
    """What became of the gradients that workers sent to one server, and how stale they were.

    Attributes:
        pushed: Gradients that came, by the worker's rank.
        taken: Gradients that went into an update.
        late: Gradients that came after their step.
        updates: How often the variables changed.
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
        """Plain values, which can be sent to other ranks."""
        return {
            "pushed": [list(entry) for entry in sorted(self.pushed.items())],
            "taken": self.taken,
            "late": self.late,
            "updates": self.updates,
            "staleness": [list(entry) for entry in sorted(self.staleness.items())],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StalenessStats:
        """The statistics that ``to_json`` was called for."""
        counters = {name: Counter(dict(value[name])) for name in ("pushed", "staleness")}
        return cls(**{**value, **counters})


class UpdateLog:
    """A file in which a server writes down its updates, one JSON object a line.

    It has what is needed to make the same updates again in one process: whose gradients went into
    each, and with which weights they were computed. Training doesn't end when the file can't be
    written: that is told once, and given up.

    Args:
        path: Folders above it are made.
        header: The first line, which tells one ``fit`` from the one before.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._journal = Journal(path, "updates", "--update-log", mode="a")
        self._write(header)

    def __enter__(self) -> UpdateLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._journal.close()

    def update(
        self,
        version: int,
        gradients: Sequence[Origin],
        *,
        staleness: int,
        learning_rate: float,
        factor: float,
    ) -> None:
        """Note an update.

        Args:
            version: The number of the weights that it made.
            gradients: Which gradients it was made of.
            staleness: How many updates there were since their weights.
            learning_rate: The optimizer's, as it was set.
            factor: The number that the learning rate was multiplied with.
        """
        self._write(
            {
                "version": version,
                "staleness": staleness,
                "learning_rate": learning_rate,
                "factor": factor,
                "gradients": [origin._asdict() for origin in gradients],
            }
        )

    def late(self, gradient: Origin) -> None:
        """Note a gradient that came after its step, and went into no update."""
        self._write({"late": gradient._asdict()})

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(entry) + "\n")
