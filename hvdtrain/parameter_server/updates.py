"""The updates of one shard: from the gradients of workers to the weights that they read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.errors import MismatchError
from hvdtrain.monitor.journal import Journal
from hvdtrain.parameter_server.gradients import GradientSum, Rows, ShardGradients
from hvdtrain.parameter_server.published_weights import PublishedWeights
from hvdtrain.parameter_server.variable_table import VariableTable

__all__ = ["GradientMean", "Origin", "ShardUpdates", "StalenessStats"]


class Origin(NamedTuple):
    """The origin of a gradient: its worker, and the weights it was computed with.

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
    """Statistics of the gradients that workers sent to one server: how many were used, how stale.

    Attributes:
        pushed: Gradients that came, by the worker's rank.
        taken: Gradients that went into an update.
        late: Gradients that came after their step.
        staleness: How many updates had how much of it: the updates between the weights that a
            gradient was computed with and those that it was applied to.
    """

    pushed: Counter[int] = field(default_factory=Counter)
    taken: int = 0
    late: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def updates(self) -> int:
        """The number of updates of the variables."""
        return self.staleness.total()

    @property
    def mean_staleness(self) -> float:
        """The mean over all updates; 0 without any."""
        total = sum(stale * count for stale, count in self.staleness.items())
        return total / max(1, self.updates)

    def percentile_of_staleness(self, percent: float) -> int:
        """Returns the least staleness that so many percent of all updates don't exceed."""
        left = percent / 100 * self.updates
        for stale in sorted(self.staleness):
            left -= self.staleness[stale]
            if left <= 0:
                return stale
        return 0

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which can be sent to other ranks."""
        return vars(self) | {"pushed": dict(self.pushed), "staleness": dict(self.staleness)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StalenessStats:
        """Returns the statistics that ``to_json`` was called for."""
        # JSON makes keys strings.
        counters = {
            name: Counter({int(key): count for key, count in value[name].items()})
            for name in ("pushed", "staleness")
        }
        return cls(**value | counters)


@dataclass(eq=False)
class ShardUpdates:
    """Applies gradients to a shard, one by one or the mean of several, and publishes the weights.

    Attributes:
        table: The variables, with their optimizer.
        published: Where their weights are put.
        log: Gets a line of JSON for each update. It has what is needed to make the same updates
            again in one process: whose gradients went into each, and with which weights they were
            computed.
        version: How many times the weights have changed.
        counts: What became of the gradients.
    """

    table: VariableTable
    published: PublishedWeights
    _: KW_ONLY
    log: Journal | None = None
    version: int = field(default=0, init=False)
    counts: StalenessStats = field(default_factory=StalenessStats, init=False)

    def __post_init__(self) -> None:
        self._published_version = -1
        self._mean = GradientMean()
        self._origins: list[Origin] = []  # of the gradients in the mean

    def state_buffer(self) -> np.ndarray:
        """Returns the optimizer's state as a flat buffer."""
        return join_bytes(self.table.state())

    def load(self, weights: np.ndarray, state: np.ndarray) -> None:
        """Take weights and the optimizer's state from flat buffers."""
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
        """Update the weights by one worker's gradients."""
        self.counts.pushed[origin.worker] += 1
        self._update(gradients, self.version - origin.version, [origin])
        self.counts.taken += 1

    def gather(self, gradients: ShardGradients, origin: Origin) -> None:
        """Keep one worker's gradients for the next ``apply_mean``.

        Raises:
            MismatchError: They are of other variables than those that were gathered before.
        """
        self.counts.pushed[origin.worker] += 1
        self._mean.add(gradients, origin.weight)
        self._origins.append(origin)
        self.counts.taken += 1

    def apply_mean(self) -> None:
        """Update the weights by what was gathered, if there is anything."""
        mean = self._mean.take()
        origins, self._origins = self._origins, []
        if mean is not None:
            self._update(mean, 0, origins)

    def drop(self, origin: Origin) -> None:
        """Note a gradient that came after its step, and goes into no update."""
        self.counts.pushed[origin.worker] += 1
        self.counts.late += 1
        if self.log is not None:
            self.log.write(json.dumps({"late": origin._asdict()}) + "\n")

    def _update(self, gradients: ShardGradients, staleness: int, origins: list[Origin]) -> None:
        if self.log is not None:
            entry = {
                "version": self.version + 1,
                "staleness": staleness,
                "learning_rate": self.table.learning_rate,
                "gradients": [origin._asdict() for origin in origins],
            }
            self.log.write(json.dumps(entry) + "\n")
        self.table.apply(gradients.flat, rows=gradients.rows, missing=gradients.missing)
        self.version += 1
        self.counts.staleness[staleness] += 1


class GradientMean:
    """Averages the gradients of several workers, in one buffer for all of them."""

    def __init__(self) -> None:
        self._sum = GradientSum()
        self._first: ShardGradients | None = None  # says what there is, and has room for the mean
        self._weight = 0.0

    def add(self, gradients: ShardGradients, weight: float) -> None:
        """Add one worker's gradients, which are overwritten.

        Raises:
            MismatchError: They are of other variables than those before.
        """
        first = self._first = self._first or gradients
        if first.missing != gradients.missing or first.rows.keys() != gradients.rows.keys():
            raise MismatchError(
                "Workers have gradients for different variables, or sparse ones where others have "
                "dense ones. All ranks must train the same variables with the same loss."
            )

        self._sum.add(gradients.by_piece(), weight)
        self._weight += weight

    def take(self) -> ShardGradients | None:
        """Returns the weighted mean, or None where nothing was added, and begins anew.

        It lies in the buffer of the gradients that were added first.
        """
        first, self._first = self._first, None
        weight, self._weight = self._weight, 0.0
        if first is None:
            return None
        rows = {}
        for number, (total, room) in enumerate(zip(self._sum.take(), first.by_piece())):
            if isinstance(total, Rows) and isinstance(room, Rows):
                values = np.divide(total.values, weight)
                rows[number] = Rows(total.indices, values.astype(room.values.dtype, copy=False))
            elif isinstance(total, np.ndarray) and isinstance(room, np.ndarray):
                np.divide(total, weight, out=room, casting="unsafe")
        return replace(first, rows=rows)
