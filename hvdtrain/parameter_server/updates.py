"""The updates of one shard: from the gradients of workers to the weights that they read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hvdtrain.collectives.fusion import join_bytes, split_bytes
from hvdtrain.collectives.kernels import widen
from hvdtrain.errors import MismatchError
from hvdtrain.parameter_server.gradients import (
    GradientSum,
    Rows,
    ShardGradients,
    map_values,
    merge_rows,
)
from hvdtrain.parameter_server.sharding import Shard
from hvdtrain.parameter_server.shared_memory import PublishedWeights
from hvdtrain.parameter_server.update_log import Origin, StalenessStats, UpdateLog
from hvdtrain.parameter_server.variable_table import VariableTable

__all__ = ["DelayCompensation", "GradientMean", "ShardUpdates"]


class ShardUpdates:
    """Applies gradients to a shard, one by one or the mean of several, and publishes the weights.

    Args:
        table: The variables, with their optimizer.
        published: Where their weights are put.
        scale_by_staleness: Divide the learning rate of each update by the gradient's staleness
            (Zhang et al. 2016, arXiv 1511.05950), where that is above 1.
        delay_compensation: Strength of ``DelayCompensation`` for gradients that are applied one by
            one; 0 for none. It takes that nobody reads weights here, which may be newer than those
            of the answer.
        log: Is told of each update.
    """

    def __init__(
        self,
        table: VariableTable,
        published: PublishedWeights,
        *,
        scale_by_staleness: bool = False,
        delay_compensation: float = 0.0,
        log: UpdateLog | None = None,
    ) -> None:
        self.table = table
        self.version = 0
        """How many times the weights have changed."""
        self.counts = StalenessStats()
        """What became of the gradients."""
        self._published = published
        self._published_version = -1
        self._scale_by_staleness = scale_by_staleness
        compensates = delay_compensation > 0
        self._compensation = (
            DelayCompensation(delay_compensation, table.shard) if compensates else None
        )
        self._log = log
        self._mean = GradientMean()
        self._origins: list[Origin] = []  # of the gradients in the mean

    @property
    def newest(self) -> np.ndarray:
        """The weights that were published last, a flat buffer."""
        return self._published.newest

    def state_buffer(self) -> np.ndarray:
        """The optimizer's state as a flat buffer."""
        return join_bytes(self.table.state())

    def load(self, weights: np.ndarray, state: np.ndarray) -> None:
        """Take weights and the optimizer's state from flat buffers."""
        self.table.load(weights)
        self.table.load_state(split_bytes(state, self.table.state()))
        self.version += 1

    def publish(self, worker: int) -> np.ndarray:
        """The weights of now, a flat buffer, with which ``worker`` goes on."""
        self._publish()
        if self._compensation is not None:
            self._compensation.sent(worker, self.newest)
        return self.newest

    def apply(self, gradients: ShardGradients, origin: Origin) -> None:
        """Update the weights by one worker's gradients."""
        self.counts.pushed[origin.worker] += 1
        staleness = self.version - origin.version
        if self._compensation is not None and staleness:
            self._publish()
            gradients = self._compensation.correct(origin.worker, gradients, self.newest)
        self._update(gradients, staleness, [origin])
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
        if self._log is not None:
            self._log.late(origin)

    def _publish(self) -> None:
        if self._published_version != self.version:
            self._published.write(self.table.weights, self.version)
            self._published_version = self.version

    def _update(self, gradients: ShardGradients, staleness: int, origins: list[Origin]) -> None:
        factor = 1.0 / max(1, staleness) if self._scale_by_staleness else 1.0
        if self._log is not None:
            self._log.update(
                self.version + 1,
                origins,
                staleness=staleness,
                learning_rate=self.table.learning_rate,
                factor=factor,
            )
        self.table.apply(gradients.flat, factor, rows=gradients.rows, missing=gradients.missing)
        self.version += 1
        self.counts.update(staleness)


class GradientMean:
    """Averages the gradients of several workers, in one buffer for all of them."""

    def __init__(self) -> None:
        self._sum = GradientSum()
        self._first: ShardGradients | None = None  # says what there is, and has room for the mean
        self._weight = 0.0

    def add(self, gradients: ShardGradients, weight: float) -> None:
        """Add one worker's gradients.

        Args:
            gradients: Overwritten.
            weight: How much they count.

        Raises:
            MismatchError: They are of other variables than those before.
        """
        first = self._first = self._first or gradients
        if first.missing != gradients.missing or first.rows.keys() != gradients.rows.keys():
            raise MismatchError(
                "Workers have gradients for different variables, or sparse ones where others have "
                "dense ones. All ranks must train the same variables with the same loss."
            )

        def weighted(values: np.ndarray) -> np.ndarray:
            wide = widen(values)
            return np.multiply(wide, weight, out=wide)

        self._sum.add([map_values(weighted, gradient) for gradient in gradients.by_piece()])
        self._weight += weight

    def take(self) -> ShardGradients | None:
        """The weighted mean, and begin anew; None where nothing was added.

        It lies in the buffer of the gradients that were added first.
        """
        first, self._first = self._first, None
        weight, self._weight = self._weight, 0.0
        if first is None:
            return None
        kinds, rows = first.kinds.copy(), {}
        for number, (total, room) in enumerate(zip(self._sum.take_wide(), first.by_piece())):
            if isinstance(total, Rows) and isinstance(room, Rows):
                values = np.divide(total.values, weight)
                rows[number] = Rows(total.indices, values.astype(room.values.dtype, copy=False))
                kinds[number] = len(total.indices)
            elif isinstance(total, np.ndarray) and isinstance(room, np.ndarray):
                np.divide(total, weight, out=room, casting="unsafe")
        return replace(first, kinds=kinds, rows=rows)


class DelayCompensation:
    """Corrects late gradients to what they would be now (Zheng et al. 2017, arXiv 1609.08326).

    A gradient g that was computed with weights from which others have moved on becomes
    g + strength * g * g * (now - then); g * g stands for the loss's second derivatives. What each
    worker was sent last is kept: one copy of the shard for each. float16 and bfloat16 are corrected
    in float32.

    Args:
        strength: The paper's lambda.
        shard: Which parts of the variables the gradients are of.
    """

    def __init__(self, strength: float, shard: Shard) -> None:
        self._strength = strength
        self._shard = shard
        self._sent: dict[int, np.ndarray] = {}

    def sent(self, worker: int, weights: np.ndarray) -> None:
        """Note with which weights, a flat buffer, a worker computes its next gradient."""
        if worker not in self._sent:
            self._sent[worker] = np.empty_like(weights)
        np.copyto(self._sent[worker], weights)

    def correct(
        self, worker: int, gradients: ShardGradients, weights: np.ndarray
    ) -> ShardGradients:
        """A worker's gradients for the weights of now.

        Args:
            worker: The rank that sent them; ``sent`` was called for it.
            gradients: Dense ones are changed in place.
            weights: The weights of now, a flat buffer.
        """
        before = self._sent[worker]
        kinds, rows = gradients.kinds.copy(), {}
        pieces = zip(gradients.by_piece(), self._shard.views(weights), self._shard.views(before))
        for number, (gradient, now, then) in enumerate(pieces):
            if isinstance(gradient, Rows):
                # The square of a row that comes several times is that of its sum.
                indices, values = merge_rows([Rows(gradient.indices, widen(gradient.values))])
                corrected = self._corrected(values, now[indices], then[indices])
                dtype = gradient.values.dtype
                rows[number] = Rows(indices, corrected.astype(dtype, copy=False))
                kinds[number] = len(indices)
            elif gradient is not None:
                gradient[...] = self._corrected(gradient, now, then)
        return replace(gradients, kinds=kinds, rows=rows)

    def _corrected(self, gradient: np.ndarray, now: np.ndarray, then: np.ndarray) -> np.ndarray:
        gradient = widen(gradient)
        moved = widen(now) - widen(then)
        return gradient + self._strength * gradient * gradient * moved
