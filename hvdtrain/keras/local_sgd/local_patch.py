"""The patch that ``distribute`` puts into a model whose ranks average weights, not gradients."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.collectives.interface import Collectives
from hvdtrain.config import Settings
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.batch_normalization import RowFlag, synchronized_layers
from hvdtrain.keras.compute import Compute
from hvdtrain.keras.local_sgd.local_steps import LocalSteps
from hvdtrain.keras.local_sgd.outer_optimizer import OuterOptimizer
from hvdtrain.keras.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.keras.membership import Change
from hvdtrain.keras.model_patch import ModelPatch
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.model_sync import check_can_be_averaged
from hvdtrain.keras.optimizer_patch import check_parts_known, mark, plain_optimizers
from hvdtrain.keras.own_updates import UpdatesAlone, weigh_steps

__all__ = ["LocalModelPatch"]


class LocalModelPatch(ModelPatch):
    """Replaces the methods of a model in a job of ``--mode local-sgd``."""

    def __init__(
        self, model: keras.Model, collectives: Collectives, presharded: bool, settings: Settings
    ) -> None:
        super().__init__(model, collectives, presharded, settings)
        check_can_be_averaged(model, settings.mode)
        self._reducer = GradientReducer.of_job("weight")
        self._averaging = self._rounds = WeightAveraging(
            model,
            self._reducer,
            sync_every=settings.sync_every,
            outer=OuterOptimizer(
                learning_rate=settings.outer_learning_rate, momentum=settings.outer_momentum
            ),
        )

    def _distribute(self, optimizer: Any) -> None:
        check_parts_known(optimizer)
        for leaf in plain_optimizers(optimizer):
            weigh_steps(leaf, UpdatesAlone, self._reducer)
        mark(optimizer, self._reducer)

    def _make_steps(self, compute: Compute, flag: RowFlag) -> ModelSteps:
        self._steps = LocalSteps(self._model, self._reducer, compute, flag, self._rounds)
        return self._steps

    def _follow(self, change: Change) -> None:
        super()._follow(change)
        self._steps.follow(len(change.now))

    def _choose_synchronized(self) -> list[Any]:
        if synchronized_layers(self._model):
            self._notice(
                "BatchNormalization(synchronized=True) normalizes each rank's batch by itself, as "
                "with --mode local-sgd ranks meet between steps alone."
            )
        return []
