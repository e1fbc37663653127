"""The updates of one shard of the variables with the gradients of workers.

After each update, the new weights are published to the workers.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.monitor.journal import Journal
from hvdtrain.parameter_server.gradients import GradientMean, ShardGradients
from hvdtrain.parameter_server.published_weights import PublishedWeights
from hvdtrain.parameter_server.variable_table import VariableTable

__all__ = ["Origin", "ShardUpdates", "StalenessStats"]


class Origin(NamedTuple):
    """The worker and the weights of a gradient."""

    worker: int
    step: int  # the number of the worker's push, from 0; the same on all servers
    version: int  # of the weights that it was computed with
    weight: float  # relative to other gradients of the same update


@dataclass(kw_only=True)
class StalenessStats:
    """Statistics of the gradients that one server received."""

    # number of gradients received, per worker
    pushed: Counter[int] = field(default_factory=Counter)
    taken: int = 0  # number of gradients that were applied
    late: int = 0  # number of gradients that were dropped because their step had already ended
    # Maps each staleness to the number of updates with this staleness. The staleness of an update
    # is the number of earlier updates that were made after the worker received the weights for its
    # gradient.
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def updates(self) -> int:
        """The number of updates."""
        return self.staleness.total()

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return vars(self) | {"pushed": dict(self.pushed), "staleness": dict(self.staleness)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StalenessStats:
        """Create statistics from the value that ``to_json`` returned."""
        # JSON turns keys into strings.
        counters = {
            name: Counter({int(key): count for key, count in value[name].items()})
            for name in ("pushed", "staleness")
        }
        return cls(**value | counters)


class ShardUpdates:
    """Applies gradients to a shard, one by one or averaged, and publishes the weights.

    Args:
        table: The variables, with their optimizer.
        published: The memory in which the weights are published to workers on this host.
        log: Receives a line of JSON for each update. The line lists the gradients that were
            applied, and the version of the weights with which each gradient was computed. A single
            process can replay the updates from the log.
    """

    def __init__(
        self, table: VariableTable, published: PublishedWeights, *, log: Journal | None = None
    ) -> None:
        self.table = table
        self.published = published
        self.version = 0  # how many times the weights have changed
        self.counts = StalenessStats()  # statistics of the gradients
        self._log = log
        self._published_version = -1
        self._mean = GradientMean()
        self._origins: list[Origin] = []  # of the gradients in the mean

    def state_buffer(self, *, averages_only: bool = False) -> np.ndarray:
        """Return the optimizer's state, or only moving averages of weights, as a flat buffer."""
        return join_bytes(self.table.state(averages_only=averages_only))

    def load(self, weights: np.ndarray, state: np.ndarray) -> None:
        """Set weights and optimizer state from flat buffers."""
        self.table.load(weights)
        self.table.load_state(split_bytes(state, self.table.state()))
        self.version += 1

    def publish(self) -> np.ndarray:
        """Publish the current weights, and return them as a flat buffer."""
        if self._published_version != self.version:
            self.published.write(self.table.weights, self.version)
            self._published_version = self.version
        return self.published.newest

    def apply(self, gradients: ShardGradients, origin: Origin) -> None:
        """Update the weights with one worker's gradients."""
        self.counts.pushed[origin.worker] += 1
        self._update(gradients, self.version - origin.version, [origin])
        self.counts.taken += 1

    def gather(self, gradients: ShardGradients, origin: Origin) -> None:
        """Add one worker's gradients to the mean.

        The next call of ``apply_mean`` applies the mean.

        Raises:
            MismatchError: If earlier gradients are for different variables.
        """
        self.counts.pushed[origin.worker] += 1
        self._mean.add(gradients, origin.weight)
        self._origins.append(origin)
        self.counts.taken += 1

    def apply_mean(self) -> None:
        """Update the weights with the mean of the gathered gradients, if any."""
        mean = self._mean.take()
        origins, self._origins = self._origins, []
        if mean is not None:
            self._update(mean, 0, origins)

    def drop(self, origin: Origin) -> None:
        """Count a gradient that arrived too late and is not applied."""
        self.counts.pushed[origin.worker] += 1
        self.counts.late += 1
        if self._log is not None:
            self._log.write(json.dumps({"late": origin._asdict()}) + "\n")

    def _update(self, gradients: ShardGradients, staleness: int, origins: list[Origin]) -> None:
        if self._log is not None:
            entry = {
                "version": self.version + 1,
                "staleness": staleness,
                "learning_rate": self.table.learning_rate,
                "gradients": [origin._asdict() for origin in origins],
            }
            self._log.write(json.dumps(entry) + "\n")
        self.table.apply(gradients)
        self.version += 1
        self.counts.staleness[staleness] += 1
