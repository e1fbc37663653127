"""Keras training that goes on without ranks that die, under Horovod's names.

A model that ``hvdtrain.distribute`` has seen needs none of it: its ``fit`` goes on by itself.
"""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.horovod import elastic_state

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


TensorFlowKerasState = elastic_state.TensorFlowKerasState
run = elastic_state.run


class KerasState(TensorFlowKerasState):
    """A model with its optimizer, and attributes such as ``batch=0, epoch=0``.

    Args:
        model: Built.
        optimizer: The one that it is compiled with if not given.
        attributes: Become attributes of the state.

    Raises:
        ValueError: The model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **attributes: Any) -> None:
        super().__init__(model, optimizer, **attributes)


class _OfState(keras.callbacks.Callback):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_OfState):
    """Commits a state after every so many steps, and at the end of each epoch.

    Args:
        state: Which.
        batches_per_commit: Each commit copies all weights, so once in a while is enough.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(_OfState):
    """Keeps the number of the last step of the epoch in ``state.batch``, and 0 between epochs.

    To do no more than the rest of an epoch, pass ``steps_per_epoch`` less it to ``fit``.

    Args:
        state: With an attribute ``batch``.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_OfState):
    """Keeps the number of complete epochs in ``state.epoch``, all calls of ``fit`` together.

    Args:
        state: With an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
