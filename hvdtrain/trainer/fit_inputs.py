"""The data that is passed to ``fit``, ``evaluate`` and ``predict``, divided among the ranks.

``InputWait`` measures how long training waits for this data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import DataError
from hvdtrain.monitor import report
from hvdtrain.trainer.data import ShardedInput, ShardPlan, Share, shard_input
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

    def run_whole_pass(
        self, sharded: ShardedInput, run: Callable[[tf.data.Dataset], Result]
    ) -> Result:
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
    return share._replace(rows=tf.zeros_like(share.rows))


class InputWait:
    """Measures how long training waits for its next batch.

    If no launcher receives reports from this job, nothing is measured. The time is measured inside
    ``tf.data``, on the thread that requests the batch. With ``steps_per_execution`` above 1,
    TensorFlow may request a batch while the previous step still computes. The measured time then
    includes time in which training did not wait.
    """

    def __init__(self) -> None:
        # Kept for all calls of fit, because tracing would take longer than a short fit.
        self._seconds: tf.Variable | None = None
        self._clock: tf.data.Dataset | None = None
        # The next pass usually has the same dataset, so it needn't be traced again.
        self._dataset: tf.data.Dataset | None = None
        self._timed: tf.data.Dataset | None = None
        self._reported_s = 0.0
        self._due_s = 0.0

    def timed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a dataset with the same elements, which measures the time to get each element."""
        if not report.is_heard():
            return dataset
        if self._timed is None or dataset is not self._dataset:
            self._dataset, self._timed = dataset, self._time(dataset)
        return self._timed

    def _time(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if self._seconds is None:
            with tf.device("CPU:0"):
                self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._clock = tf.data.Dataset.from_tensors(0).repeat().map(_now)
        seconds = self._seconds

        @tf.autograph.experimental.do_not_convert
        def add_wait(requested_s: tf.Tensor, element: Any) -> Any:
            seconds.assign_add(tf.timestamp() - requested_s)
            return element

        options = tf.data.Options()
        # Autotuning would add a prefetch buffer after this stage. Then the time that the buffer's
        # thread waits would be measured, and not the time that training waits.
        options.experimental_optimization.inject_prefetch = False
        # zip requests its inputs in this order: first the time, then the batch.
        return tf.data.Dataset.zip((self._clock, dataset)).map(add_wait).with_options(options)

    def release_dataset(self) -> None:
        """Release the dataset that was read last, and the memory of its data."""
        self._dataset = self._timed = None

    def report_if_due(self) -> None:
        """Report to the launcher how long training has waited. Do this about once a second."""
        if self._seconds is not None and time.monotonic() >= self._due_s:
            self.report()

    def report(self) -> None:
        """Report to the launcher how long training has waited since the last report."""
        if self._seconds is None:
            return
        self._due_s = time.monotonic() + report.INTERVAL_S
        seconds = float(self._seconds.numpy())
        report.waited_for_input(seconds - self._reported_s)
        self._reported_s = seconds


@tf.autograph.experimental.do_not_convert
def _now(_: tf.Tensor) -> tf.Tensor:
    return tf.timestamp()
