"""The data that is passed to ``fit``, ``evaluate`` and ``predict``, divided among the ranks.

``InputWait`` measures how long training waits for this data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import DataError
from hvdtrain.monitor import report
from hvdtrain.trainer.data import HostBatches, ShardedInput, ShardPlan, Share, shard_input
from hvdtrain.trainer.membership import Membership

__all__ = ["FitInputs", "InputWait"]

Result = TypeVar("Result")


class FitInputs:
    """Divides the data that is passed to a model's ``fit``, ``evaluate`` and ``predict``.

    Args:
        seed: Seed of the sample order, equal on all ranks.
        presharded: True if each rank passes only its own part of the data. False if each rank
            passes all data.
        warn: Function that logs a warning on the chief. It logs each warning only once.
        ignore_rows: Whether ``evaluate`` and ``predict`` ignore this rank's own rows. This rank
            still takes part in the collectives that the other ranks run.
    """

    def __init__(
        self,
        collectives: Engine,
        membership: Membership,
        *,
        seed: int,
        presharded: bool,
        warn: Callable[[str | None], None],
        ignore_rows: bool = False,
    ) -> None:
        self._collectives = collectives
        self._membership = membership
        self.seed = seed
        self.presharded = presharded
        self._warn = warn
        self._ignore_rows = ignore_rows

    def shard(
        self, x: Any, y: Any = None, sample_weight: Any = None, **options: Any
    ) -> ShardedInput:
        """Return this rank's share of an input. All ranks must call this.

        ``options`` are passed to ``ShardPlan``.

        Raises:
            DataError: If the input can't be divided among the ranks. Also if the job is elastic,
                and the input can't be read again in the same order.
        """
        self._membership.renew()
        plan = ShardPlan(
            rank=self._membership.rank,
            size=self._membership.size,
            seed=self.seed,
            collectives=self._collectives,
            presharded=self.presharded,
            **options,
        )
        sharded = shard_input(x, y, sample_weight, plan=plan)
        self._warn(sharded.notice)
        if plan.trains and self._membership.elastic and not sharded.repeatable:
            raise DataError(
                "An elastic job (--elastic) must be able to start a pass over the tf.data pipeline "
                "again when a rank is lost, but this pipeline's shuffle would use a different "
                "order then. Use Dataset.shuffle(..., reshuffle_each_iteration=False), or shuffle "
                "only once and in the pipeline itself. Or pass arrays or a keras.utils.PyDataset, "
                "because hvdtrain shuffles these, or use --max-restarts instead of --elastic."
            )
        return sharded

    def run_whole_pass(self, sharded: ShardedInput, run: Callable[[Any], Result]) -> Result:
        """Call ``run`` with this rank's part of the data, and return its result.

        If ranks are lost during the call, the data is divided again, and the remaining ranks repeat
        the call with all data. ``sharded`` may have been divided before ranks were lost.
        """
        while True:
            sharded = sharded.reshard(rank=self._membership.rank, size=self._membership.size)
            sharded.on_epoch_begin(0)
            dataset = sharded.dataset
            result = run(dataset.map(_without_rows) if self._ignore_rows else dataset)
            sharded.on_epoch_end()
            if not self._membership.renew():
                return result


def _without_rows(share: Share) -> Share:
    return share._replace(rows=share.rows * 0)


class _Clock(Protocol):
    """Measures the time to get the elements of a dataset."""

    @property
    def seconds(self) -> float:
        """The time that was waited for all elements of all datasets."""

    def timed(self, dataset: Any) -> Any:
        """Return a dataset with the same elements, whose time is measured."""


class _HostClock:
    seconds = 0.0

    def timed(self, batches: HostBatches) -> HostBatches:
        return batches.through(self._measure)

    def _measure(self, shares: Iterator[Share]) -> Iterator[Share]:
        while True:
            requested_s = time.perf_counter()
            share = next(shares, None)
            self.seconds += time.perf_counter() - requested_s
            if share is None:
                return
            yield share


class InputWait:
    """Measures how long training waits for its next batch.

    If no launcher receives reports from this job, nothing is measured. ``HostBatches`` are measured
    on the thread that requests a batch, and datasets of TensorFlow as in ``DatasetClock``.
    """

    def __init__(self) -> None:
        # Kept for all calls of fit, because tracing would take longer than a short fit.
        self._clock: _Clock | None = None
        # The next pass usually has the same dataset, so it needn't be traced again.
        self._dataset: Any = None
        self._timed: Any = None
        self._reported_s = 0.0
        self._due_s = 0.0

    def timed(self, dataset: Any) -> Any:
        """Return a dataset with the same elements, which measures the time to get each element."""
        if not report.is_heard():
            return dataset
        if self._clock is None:
            self._clock = _clock_for(dataset)
        if self._timed is None or dataset is not self._dataset:
            self._dataset, self._timed = dataset, self._clock.timed(dataset)
        return self._timed

    def release_dataset(self) -> None:
        """Release the dataset that was read last, and the memory of its data."""
        self._dataset = self._timed = None

    def report_if_due(self) -> None:
        """Report to the launcher how long training has waited. Do this about once a second."""
        if self._clock is not None and time.monotonic() >= self._due_s:
            self.report()

    def report(self) -> None:
        """Report to the launcher how long training has waited since the last report."""
        if self._clock is None:
            return
        self._due_s = time.monotonic() + report.INTERVAL_S
        seconds = self._clock.seconds
        report.waited_for_input(seconds - self._reported_s)
        self._reported_s = seconds


def _clock_for(dataset: Any) -> _Clock:
    if isinstance(dataset, HostBatches):
        return _HostClock()
    from hvdtrain.trainer.data.tensorflow.datasets import DatasetClock

    return DatasetClock()
