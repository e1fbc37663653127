"""``Allreduce``, the strategy in which ranks average gradients. It is the default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import RESULTS, SYMBOLIC_BUILD
from hvdtrain.trainer import backends
from hvdtrain.trainer.backends.interface import Steps
from hvdtrain.trainer.batch_normalization import (
    synchronize_batch_normalization,
    synchronized_layers,
)
from hvdtrain.trainer.fit_loop import FitLoop
from hvdtrain.trainer.learning_rate import has_rate_factor, prepare_rescaling, rescale_rate
from hvdtrain.trainer.membership import Change
from hvdtrain.trainer.model_parts import optimizers_of
from hvdtrain.trainer.model_patch import ModelPatch
from hvdtrain.trainer.model_sync import broadcast_model
from hvdtrain.trainer.optimizer_patch import distribute_optimizer
from hvdtrain.trainer.variables import attach_state

if TYPE_CHECKING:
    from hvdtrain.trainer.local_sgd.weight_averaging import WeightAveraging

__all__ = ["Allreduce", "install_loops", "rescale_rates"]


class Allreduce:
    """The strategy in which ranks average their gradients in each step."""

    def __init__(self, *, sparse_as_dense: bool = False) -> None:
        self._reducer = GradientReducer.of_job(sparse_as_dense=sparse_as_dense)

    def install(self, patch: ModelPatch) -> None:
        """Replace the model's methods. All ranks must call this."""
        model = patch.model
        for optimizer in optimizers_of(model):
            distribute_optimizer(optimizer, self._reducer)
        layers = _synchronized_layers(patch)
        steps = backends.of_keras().make_steps(
            model, self._reducer, patch.settings, synchronized=layers, warn=patch.warn_once
        )
        for layer in layers:
            synchronize_batch_normalization(
                layer, patch.collectives, lambda: steps.step_rows, lambda: steps.step_weight
            )
        install_loops(patch, self._reducer, steps)

    def on_change(self, model: keras.Model, change: Change) -> None:
        """Rescale the learning rates to the number of ranks."""
        rescale_rates(model, change)


def install_loops(
    patch: ModelPatch,
    reducer: GradientReducer,
    steps: Steps,
    averaging: WeightAveraging | None = None,
) -> None:
    """Replace the methods of a model that all ranks call together. All ranks must call this.

    ``averaging`` averages the weights if ranks train different weights between averages.
    """
    model, collectives = patch.model, patch.collectives
    if patch.membership.elastic:
        for optimizer in optimizers_of(model):
            prepare_rescaling(optimizer)
    loops = FitLoop(
        model,
        collectives,
        membership=patch.membership,
        inputs=patch.inputs(collectives, patch.membership),
        reducer=reducer,
        steps=steps,
        averaging=averaging,
    )
    hooks: dict[str, Any] = {RESULTS: loops.joint_results, SYMBOLIC_BUILD: loops.symbolic_build}
    patch.replace(
        fit=loops.fit,
        evaluate=loops.evaluate,
        predict=loops.predict,
        **steps.methods(),
        **hooks,
    )
    report.watch(
        lambda: collectives.waiting_in,
        lambda: collectives.waited_s,
        lambda: collectives.reduced_bytes,
    )
    broadcast_model(model, collectives)


def rescale_rates(model: keras.Model, change: Change) -> None:
    """Rescale the learning rates of a model to the number of ranks after a change."""
    attach_state(model)
    for optimizer in optimizers_of(model):
        rescale_rate(optimizer, len(change.before), len(change.now))
    if keras.backend.backend() == "jax" and any(map(has_rate_factor, optimizers_of(model))):
        # A compiled step contains the factors of learning rate schedules as constants.
        model.make_train_function(force=True)


def _synchronized_layers(patch: ModelPatch) -> list[Any]:
    """Return the layers that compute mean and variance over the samples of all ranks."""
    layers = synchronized_layers(patch.model)
    if layers and patch.settings.towers > 1:
        patch.warn_once(
            "BatchNormalization(synchronized=True) normalizes the part of each tower "
            "separately, because the towers compute one after another."
        )
        return []
    return layers
