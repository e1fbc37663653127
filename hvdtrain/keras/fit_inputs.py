"""The inputs of ``fit``, ``evaluate`` and ``predict``, shared out among the ranks there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import DataError
from hvdtrain.keras.data import ShardedInput, ShardPlan, Share, shard_input
from hvdtrain.keras.membership import Membership
from hvdtrain.monitor import report

__all__ = ["FitInputs", "InputWait"]


Result = TypeVar("Result")


class FitInputs:
    """Shares out what a model is given.

    Args:
        seed: The source of the data's orders, the same on all ranks.
        watches: Whether this rank's own data count for nothing: what it evaluates and predicts is
            that of the others, at whose side it does every step.
    """

    def __init__(
        self,
        collectives: Engine,
        membership: Membership,
        *,
        seed: int,
        presharded: bool,
        notice: Callable[[str | None], None],
        watches: bool = False,
    ) -> None:
        self._collectives = collectives
        self._membership = membership
        self.seed = seed
        self.presharded = presharded
        self._notice = notice
        self._watches = watches

    def share(self, x: Any, y: Any = None, sample_weight: Any = None, **given: Any) -> ShardedInput:
        """This rank's share of an input; ``given`` are fields of ``ShardPlan``. Collective.

        Raises:
            DataError: The input can't be shared out.
        """
        self._membership.renew()
        plan = ShardPlan(
            rank=self._membership.rank,
            size=self._membership.size,
            seed=self.seed,
            collectives=self._collectives,
            presharded=self.presharded,
            **given,
        )
        sharded = shard_input(x, y, sample_weight, plan=plan)
        self._notice(sharded.notice)
        return sharded

    def check_repeatable(self, sharded: ShardedInput) -> None:
        """Check that the rest of a pass can be shared out anew, where ranks may be lost.

        Raises:
            DataError: It can't.
        """
        if self._membership.elastic and not sharded.repeatable:
            raise DataError(
                "In an elastic job (--elastic) a pass over the tf.data pipeline must be able to "
                "begin again when a rank is lost, and its shuffle has another order then. Use "
                "Dataset.shuffle(..., reshuffle_each_iteration=False), or shuffle in the pipeline "
                "itself and once; or pass arrays or a keras.utils.PyDataset, which hvdtrain "
                "shuffles; or use --max-restarts in place of --elastic."
            )

    def whole_pass(self, sharded: ShardedInput, run: Callable[[tf.data.Dataset], Result]) -> Result:
        """Return what ``run`` makes of a whole input, on all ranks; anew if one was lost meanwhile.

        Args:
            sharded: This rank's share, perhaps from when there were more ranks.
            run: Takes this rank's part as ``ShardedInput.dataset``.
        """
        while True:
            sharded = sharded.reshard(rank=self._membership.rank, size=self._membership.size)
            sharded.on_epoch_begin(0)
            dataset = sharded.dataset
            result = run(dataset.map(_without_rows) if self._watches else dataset)
            sharded.on_epoch_end()
            if not self._membership.renew():
                return result


def _without_rows(share: Share) -> Share:
    """Return a share in which nothing counts."""
    return share._replace(rows=tf.zeros_like(share.rows))


class InputWait:
    """Times each batch of a dataset from when it is asked for until it is there.

    What is measured is added up inside ``tf.data``, on the thread that asks, so that it is the
    same whatever runs the steps. With ``steps_per_execution`` above 1 TensorFlow may ask for a
    batch while the step before computes, and all of that time counts.
    """

    def __init__(self) -> None:
        # Made once for all calls of fit, as tracing takes longer than some of them.
        self._seconds: tf.Variable | None = None
        self._clock: tf.data.Dataset | None = None
        # Of the last pass: where the next one has the same dataset, it is traced once.
        self._dataset: tf.data.Dataset | None = None
        self._timed: tf.data.Dataset | None = None
        self._told_s = 0.0
        self._due_s = 0.0

    def timed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a timed dataset of the same elements; the dataset itself where nobody listens."""
        if not report.is_heard():
            return dataset
        if self._timed is None or dataset is not self._dataset:
            self._dataset, self._timed = dataset, self._time(dataset)
        return self._timed

    def _time(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if self._seconds is None:
            with tf.device("CPU:0"):
                self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        if self._clock is None:
            self._clock = tf.data.Dataset.from_tensors(0).repeat().map(_now)
        seconds = self._seconds

        @tf.autograph.experimental.do_not_convert
        def note(asked_s: tf.Tensor, element: Any) -> Any:
            seconds.assign_add(tf.timestamp() - asked_s)
            return element

        options = tf.data.Options()
        # Otherwise a pipeline that is tuned gets a buffer behind this, whose thread never waits.
        options.experimental_optimization.inject_prefetch = False
        # What is zipped is asked for in this order.
        return tf.data.Dataset.zip((self._clock, dataset)).map(note).with_options(options)

    def forget_dataset(self) -> None:
        """Let go of the last pass's dataset, with the data that it may hold."""
        self._dataset = self._timed = None

    def tell_often(self) -> None:
        """Report it, about once a second; costs next to nothing otherwise."""
        if self._seconds is not None and time.monotonic() >= self._due_s:
            self.tell()

    def tell(self) -> None:
        """Report what was waited since it was reported last."""
        if self._seconds is None:
            return
        self._due_s = time.monotonic() + report.INTERVAL_S
        seconds = float(self._seconds.numpy())
        report.waited_for_input(seconds - self._told_s)
        self._told_s = seconds


@tf.autograph.experimental.do_not_convert
def _now(_: tf.Tensor) -> tf.Tensor:
    return tf.timestamp()
