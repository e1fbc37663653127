"""Horovod's elastic training states that contain TensorFlow variables or Keras models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.compat.horovod.broadcast import broadcast_variables
from hvdtrain.compat.horovod.elastic_state import ObjectState

__all__ = ["TensorFlowKerasState", "TensorFlowState"]


class TensorFlowState(ObjectState):
    """Training state that consists of variables and attributes.

    Args:
        variables: Variables in the same order on all ranks.
        session: Ignored.
        attributes: Attributes of the state and their initial values.

    Raises:
        ValueError: If ``variables`` is None.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: None = None, **attributes: Any
    ) -> None:
        if variables is None:
            raise ValueError(
                "TensorFlowState requires variables; pass [*model.variables, *optimizer.variables]."
            )
        self.variables = list(variables)
        self._values: list[np.ndarray] = []
        super().__init__(**attributes)
        self.save()

    def save(self) -> None:
        """Keep a copy of the state in memory, to which ``restore`` returns."""
        self._values = [np.array(variable.numpy()) for variable in self.variables]
        super().save()

    def restore(self) -> None:
        """Restore the state from the last copy."""
        for variable, value in zip(self.variables, self._values):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Replace the state of all ranks with the state of rank 0. All ranks must call this."""
        broadcast_variables(self.variables, root_rank=0)
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """Training state that consists of a Keras model, its optimizer, and attributes.

    Args:
        model: Built model.
        optimizer: Optimizer. Defaults to ``model.optimizer``.
        backend: Ignored.
        attributes: Attributes of the state and their initial values.

    Raises:
        ValueError: If the model is not built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: None = None, **attributes: Any
    ) -> None:
        if not model.built:
            raise ValueError(
                f"Model {model.name!r} is not built; call model.build(input_shape) first."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else model.optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__([*model.variables, *self.optimizer.variables], **attributes)
