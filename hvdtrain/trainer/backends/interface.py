"""What the trainer needs of a Keras backend.

Keras' loops are almost the same with each backend, but the step inside them is not. TensorFlow and
JAX trace a step, and then run the traced program. torch runs a step as Python code. Each module in
this package replaces methods of a model, so that its steps weight the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras

from hvdtrain.config import Settings
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.additive_metrics import AdditiveMetrics
from hvdtrain.trainer.moving_statistics import MovingStatistics

__all__ = ["Backend", "Number", "Steps"]


class Number(Protocol):
    """An integer that checkpoints save: a Keras variable, or an object on the host."""

    def numpy(self) -> Any:
        """Return the value as a NumPy scalar or array."""

    def assign(self, value: Any) -> Any:
        """Set the value."""


class Steps(Protocol):
    """The training, test and prediction steps of one model.

    The steps receive either a ``Share`` from a divided input, or a batch that was passed to
    ``train_on_batch``, ``test_on_batch`` or ``predict_on_batch``.
    """

    statistics: MovingStatistics  # the statistics that layers keep of their batches
    additive: AdditiveMetrics  # tests the model's custom metrics
    joint_rows_known: bool  # Whether ``Share.joint_rows`` is set in each step. The trainer sets it.
    # For each step of a prediction, an int64 array of shape (1, 2). It contains the number of rows
    # that count, which is 0 or all, and the number of rows of the batch.
    predicted_rows: list[Any]
    # The number of rows that count in the current training step. None between steps.
    step_rows: Any
    # The factor by which the optimizers multiply the gradients of the current training step. None
    # between steps, or if the loss itself is multiplied.
    step_weight: Any
    samples: Number  # the number of samples that this rank has trained on
    ran: Number  # the number of training steps in this process, including the current one
    rows: Number  # the number of samples that counted in the last training or test step

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods to replace on the model, by name."""

    def own_errors(self) -> AbstractContextManager[None]:
        """Raise the errors of hvdtrain in the ``with`` block, not the backend's errors about them.

        Keras runs steps in this block.
        """


class Backend(Protocol):
    """A module of this package."""

    def check_model(self, model: keras.Model) -> None:
        """Raise ``ModelError`` if Keras already distributes the model over devices."""

    def make_steps(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        settings: Settings,
        *,
        synchronized: Sequence[Any],
        warn: Callable[[str | None], None],
    ) -> Steps:
        """Create the steps of a model whose gradients are averaged over all ranks.

        Args:
            model: A compiled and built model.
            reducer: Combines values over ranks.
            settings: The settings of the job.
            synchronized: Layers that normalize with the mean and variance over the batches of all
                ranks.
            warn: Function that logs a warning on the chief, each warning only once.

        Raises:
            ModelError: If the settings need another backend.
        """
