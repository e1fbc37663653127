"""Checks of a model before a training step."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import ModelError
from hvdtrain.trainer.loss_weights import are_sums
from hvdtrain.trainer.model_parts import overrides

__all__ = ["FixedVariables", "check_sums"]


class FixedVariables:
    """The variables that may not be added, removed or reordered after ``distribute``.

    These are the trainable variables. If the model overrides ``train_step``, they are all
    variables.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._paths = [variable.path for variable in self._variables()]

    def check(self) -> None:
        """Check that the variables are still the same.

        Raises:
            ModelError: If they have changed.
        """
        now = [variable.path for variable in self._variables()]
        if now != self._paths:
            changed = sorted(set(now) ^ set(self._paths)) or ["their order"]
            raise ModelError(
                "The variables that are trained changed after hvdtrain.distribute(model): "
                f"{', '.join(changed)}. Add layers and set `trainable` first, then compile the "
                "model and call hvdtrain.distribute(model) again."
            )

    def _variables(self) -> list[Any]:
        own = overrides(self._model, "train_step")
        return list(self._model.variables if own else self._model.trainable_variables)


def check_sums(model: keras.Model) -> None:
    """Check that an elastic job can separate losses that are sums from other losses.

    Raises:
        ModelError: If the model has both.
    """
    if are_sums(model) and model.losses:
        raise ModelError(
            "In an elastic job (--elastic) losses with reduction='sum' and regularization can't be "
            "separated when a rank is lost. Use reduction='sum_over_batch_size', or "
            "--max-restarts instead of --elastic."
        )
