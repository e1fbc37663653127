"""Options with which tf.data runs the datasets that enter Keras' loops."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["untuned"]


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Let a dataset yield its elements in one fixed order, and without tf.data's autotuning.

    To drop an iterator means to join the thread that tunes it. TensorFlow wakes that thread before
    it marks the iterator as cancelled (``CancellationManager::StartCancelWithStatus`` runs its
    callbacks first), so that the thread often goes back to sleep for the rest of its period, which
    doubles from 10 ms to a minute: ``fit`` would end that much later.
    What has ``num_parallel_calls=AUTOTUNE`` runs on all threads of the process, at most 16, and
    prefetching adjusts itself. A pipeline that sets any of ``options.autotune`` keeps its settings.
    """
    options = tf.data.Options()
    options.deterministic = True
    if dataset.options().autotune == tf.data.experimental.AutotuneOptions():
        options.autotune.enabled = False
    return dataset.with_options(options)
