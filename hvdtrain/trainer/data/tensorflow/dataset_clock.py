"""Measurement of the time that training waits for the elements of a ``tf.data.Dataset``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["DatasetClock"]


class DatasetClock:
    """Measures time inside ``tf.data``, on the thread that requests a batch.

    With ``steps_per_execution`` above 1, TensorFlow may request a batch while the previous step
    still computes. The measured time then includes time in which training did not wait.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self._clock = tf.data.Dataset.from_tensors(0).repeat().map(_now)

    @property
    def seconds(self) -> float:
        """The time that was waited for all elements of all datasets."""
        return float(self._seconds.numpy())

    def timed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a dataset with the same elements, whose time is measured."""
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


@tf.autograph.experimental.do_not_convert
def _now(_: tf.Tensor) -> tf.Tensor:
    return tf.timestamp()
