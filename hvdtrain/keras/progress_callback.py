"""Tells the launcher how far ``fit`` is; it notices with that when a rank hangs."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.monitor import report

__all__ = ["ProgressCallback"]


class ProgressCallback(keras.callbacks.Callback):
    """Reports steps, and what takes long without being one.

    Args:
        epochs: Where ``fit`` stands.
    """

    def __init__(self, epochs: EpochIterator) -> None:
        super().__init__()
        self._epochs = epochs
        self._epoch = 0
        self._compiled = False

    def on_train_begin(self, logs: Any = None) -> None:
        report.phase("compiling")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self._compiled:
            report.phase("training")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._compiled = True
        report.step(self._epochs.step, self._epoch)
        report.phase("training")

    def on_test_begin(self, logs: Any = None) -> None:
        report.phase("validation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        report.phase("end of an epoch")

    def on_train_end(self, logs: Any = None) -> None:
        report.phase("after fit")
