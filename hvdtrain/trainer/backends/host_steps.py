"""What the steps of torch and JAX have in common: decisions on the host before a step.

With these backends, a process knows how many rows of a batch count before it runs a step. The
weights of a step are therefore numbers, and not a part of the compiled step as on TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np

from hvdtrain import world
from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.additive_metrics import AdditiveMetrics
from hvdtrain.trainer.backends.step_checks import FixedVariables, check_sums
from hvdtrain.trainer.data import Share
from hvdtrain.trainer.data.host_batches import JOINT_ROWS_UNKNOWN
from hvdtrain.trainer.loss_weights import LossWeights, are_sums, has_vector_losses, ratio
from hvdtrain.trainer.model_parts import overrides
from hvdtrain.trainer.moving_statistics import MovingStatistics
from hvdtrain.trainer.optimizer_mixins import Weighting
from hvdtrain.trainer.step_variables import step_variable

__all__ = ["HostSteps", "StepWeights", "rows_of"]


class StepWeights(NamedTuple):
    """The weights of this rank's batch in one training step."""

    batch: Any  # the batch, as Keras passes it to a step
    rows: int  # The number of rows that count. If it is 0, the batch only has the right structure.
    joint_rows: int  # the number of rows of all ranks
    row_weight: float  # the weight w_r in a mean over the rows of all ranks
    # How the optimizers combine the gradients of the step over ranks. Its ``factor`` is a number.
    weighting: Weighting


class HostSteps:
    """The steps of one model, without the functions that Keras' loops call.

    ``interface.Steps`` describes the public attributes.

    Raises:
        ModelError: If the job uses ``--mode towers``.
    """

    def __init__(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        settings: Settings,
        *,
        synchronized: Sequence[Any],
    ) -> None:
        if settings.towers > 1:
            raise ModelError(
                "--mode towers needs the Keras backend tensorflow, got "
                f"{keras.backend.backend()}; start a rank per GPU with hvdtrain run -np N, or set "
                "KERAS_BACKEND=tensorflow."
            )
        self._model = model
        self._reducer = reducer
        self._elastic = reducer.collectives.survives_losses
        self._member = world.collectives().member
        self._variables = FixedVariables(model)
        self._weights = LossWeights(reducer, model)
        self.statistics = MovingStatistics(model, synchronized)
        self.additive = AdditiveMetrics(model)
        self.joint_rows_known = False
        self.predicted_rows: list[Any] = []
        self.step_rows: Any = None
        self.step_weight: Any = None
        self.samples = step_variable(0, dtype="int64", name="samples")
        self.ran = step_variable(0, dtype="int64", name="ran")
        self.rows = step_variable(0, dtype="int64", name="rows")

    def own_errors(self) -> AbstractContextManager[None]:
        """Return a context manager in which errors of hvdtrain are raised as themselves."""
        return nullcontext()

    def begin_training(self, data: Any) -> StepWeights:
        """Count a training step, and return its weights.

        ``data`` is a ``Share``, or a batch that was passed to ``train_on_batch``. If the number of
        rows of all ranks is unknown, ranks exchange it.
        """
        self._variables.check()
        if self._elastic:
            check_sums(self._model)
            if isinstance(data, Share):
                self._reducer.contributions.begin_step()
        batch, rows, joint_rows = self.share_of(data)
        if joint_rows is None:
            own = np.asarray(rows, np.float32)
            joint_rows = int(self._reducer.reduce(own, "sum", "counts of all ranks"))
        self.rows.assign(rows)
        self.samples.assign(self.samples.value + rows)
        self.ran.assign(self.ran.value + 1)
        sums = are_sums(self._model)
        row_weight = self._weights.weight(rows, joint_rows, sums=False)
        weight = self._weights.weight(rows, joint_rows, sums)
        if has_vector_losses(self._model):
            weight *= ratio(joint_rows, rows)
        weighting = self._weights.weighting(sums, weight, weight, ())
        return StepWeights(batch, rows, joint_rows, row_weight, weighting)

    def with_terms(self, how: Weighting, terms: Sequence[Any]) -> Weighting:
        """Let the optimizers use the terms of the losses, which Keras' step computes first.

        A custom ``train_step`` may compute several losses, so its gradients are weighted by rows.
        """
        return how if overrides(self._model, "train_step") else how._replace(terms=terms)

    def begin_test(self, data: Any) -> tuple[Any, int | None, int | None]:
        """Count the rows of a test step.

        Return the batch and the arguments of ``LossWeights.joint_loss``. The rows of a batch that
        was passed to ``test_on_batch`` are None, because a single rank may call that method.
        """
        batch, rows, joint_rows = self.share_of(data)
        self.rows.assign(rows)
        return batch, rows if isinstance(data, Share) else None, joint_rows

    def begin_prediction(self, data: Any) -> Any:
        """Record the rows of a prediction step, and return its batch."""
        if not isinstance(data, Share):
            return data
        rows = [[int(data.rows), rows_of(data.batch)]]
        self.predicted_rows.append(np.array(rows, np.int64))
        return data.batch

    @staticmethod
    def share_of(data: Any) -> tuple[Any, int, int | None]:
        """Return the batch, its rows that count, and the rows of all ranks or None if unknown."""
        if not isinstance(data, Share):
            return data, rows_of(data), None
        # On GPUs, Keras may have moved the numbers to the device.
        joint_rows = None if data.joint_rows is None else int(data.joint_rows)
        return data.batch, int(data.rows), None if joint_rows == JOINT_ROWS_UNKNOWN else joint_rows


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch."""
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])
