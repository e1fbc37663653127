"""The time that training waits for its next batch, measured where somebody listens."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from hvdtrain.monitor import report

__all__ = ["InputWait"]


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
