"""Horovod's elastic training with Keras.

Models that are passed to ``hvdtrain.distribute`` don't need it.
"""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.compat.horovod import elastic_state, tensorflow_elastic

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


TensorFlowKerasState = tensorflow_elastic.TensorFlowKerasState
run = elastic_state.run


class KerasState(TensorFlowKerasState):
    """Training state that consists of a model, its optimizer, and attributes such as ``epoch=0``.

    Args:
        model: Built model.
        optimizer: Optimizer. Defaults to ``model.optimizer``.
        attributes: Attributes of the state and their initial values.

    Raises:
        ValueError: If the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **attributes: Any) -> None:
        super().__init__(model, optimizer, **attributes)


class _StateCallback(keras.callbacks.Callback):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Callback that commits a training state every few steps and at the end of each epoch.

    Args:
        state: Training state.
        batches_per_commit: Number of steps between commits. Each commit copies all weights.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Start counting steps."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit the state every ``batches_per_commit`` steps."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit the state."""
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Callback that sets ``state.batch`` to the number of the latest step of the epoch.

    Between epochs, ``state.batch`` is 0.

    If an epoch was interrupted, the callback does not skip the steps that are done. To train only
    for the remaining steps, pass ``steps_per_epoch=steps - state.batch`` to ``fit``, where
    ``steps`` is the number of steps in a complete epoch.

    Args:
        state: Training state with an attribute ``batch``.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set ``state.batch`` to the number of the step."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set ``state.batch`` to 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Callback that counts completed epochs in ``state.epoch``.

    The count continues in later calls of ``fit``.

    Args:
        state: Training state with an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Continue counting epochs from ``state.epoch``."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set ``state.epoch`` to the number of completed epochs."""
        self.state.epoch = self.initial_epoch + epoch + 1
