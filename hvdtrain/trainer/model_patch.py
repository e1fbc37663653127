"""The methods that ``distribute`` replaces on a model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import RESULTS, SYMBOLIC_BUILD, set_untracked
from hvdtrain.trainer import backends
from hvdtrain.trainer.backends.interface import Steps
from hvdtrain.trainer.batch_normalization import (
    synchronize_batch_normalization,
    synchronized_layers,
)
from hvdtrain.trainer.callback_list import list_callbacks
from hvdtrain.trainer.fit_inputs import FitInputs
from hvdtrain.trainer.fit_loop import FitLoop, reset_functions
from hvdtrain.trainer.learning_rate import prepare_rescaling, rescale_rate
from hvdtrain.trainer.membership import Change, Membership
from hvdtrain.trainer.model_parts import optimizers_of
from hvdtrain.trainer.model_sync import broadcast_model
from hvdtrain.trainer.optimizer_patch import distribute_optimizer
from hvdtrain.trainer.rank_random import draw_seed, reseed_by_rank
from hvdtrain.trainer.saving.checkpoint_callback import find_checkpoint_callback

if TYPE_CHECKING:
    from hvdtrain.trainer.local_sgd.weight_averaging import WeightAveraging

__all__ = ["ModelPatch"]

logger = logging.getLogger(__package__)

_MARK = "_hvdtrain_methods"


class ModelPatch:
    """Replaces methods of one model object. The model's class is not changed."""

    def __init__(
        self,
        model: keras.Model,
        collectives: Engine,
        presharded: bool,
        settings: Settings,
        sparse_as_dense: bool = False,
    ) -> None:
        self._model = model
        self._collectives = collectives
        self._membership = Membership(collectives, settings.min_np, [self._on_change])
        self._presharded = presharded
        self._reducer = GradientReducer.of_job(sparse_as_dense=sparse_as_dense)
        self._settings = settings
        self._backend = backends.of_keras()
        self._warned: set[str] = set()
        self._averaging: WeightAveraging | None = None

    def install(self) -> None:
        """Make the model train on all ranks together. All ranks must call this.

        Raises:
            ModelError: If Keras already distributes the model over devices.
        """
        model, collectives = self._model, self._collectives
        self._remove_earlier()
        self._check_model()
        seed = draw_seed(collectives)
        for optimizer in optimizers_of(model):
            self._distribute(optimizer)
            if self._membership.elastic:
                prepare_rescaling(optimizer)
        steps = self._make_steps()
        for layer in self._synchronized_layers():
            synchronize_batch_normalization(layer, collectives, lambda: steps.step_rows)
        inputs = FitInputs(
            collectives,
            self._membership,
            seed=seed,
            presharded=self._presharded,
            warn=self._warn_once,
        )
        loops = FitLoop(
            model,
            collectives,
            membership=self._membership,
            inputs=inputs,
            reducer=self._reducer,
            steps=steps,
            averaging=self._averaging,
        )
        hooks: dict[str, Callable[..., Any]] = {
            RESULTS: loops.joint_results,
            SYMBOLIC_BUILD: loops.symbolic_build,
        }
        self._replace(
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
        reset_functions(model)
        broadcast_model(model, collectives)
        reseed_by_rank(model, collectives)

    def install_with_checkpoint(self) -> None:
        """Wait until ``fit`` receives a ``Checkpoint`` callback, then call ``install``."""
        self._remove_earlier()
        plain_fit = self._model.fit

        def fit(*args: Any, **options: Any) -> Any:
            arguments = inspect.signature(plain_fit).bind(*args, **options).arguments
            if find_checkpoint_callback(list_callbacks(arguments.get("callbacks"))) is None:
                return plain_fit(*args, **options)
            self.install()
            return self._model.fit(*args, **options)

        self._replace(fit=fit)

    def _distribute(self, optimizer: Any) -> None:
        """Make an optimizer apply the same updates on all ranks."""
        distribute_optimizer(optimizer, self._reducer)

    def _make_steps(self) -> Steps:
        return self._backend.make_steps(
            self._model,
            self._reducer,
            self._settings,
            synchronized=self._synchronized_layers(),
            warn=self._warn_once,
        )

    def _check_model(self) -> None:
        """Raise ``ModelError`` if Keras itself would combine gradients over devices."""
        if keras.distribution.distribution() is not None:
            raise ModelError(
                "keras.distribution is set, so Keras would combine gradients over devices a second "
                "time. Leave out keras.distribution.set_distribution(…), because hvdtrain starts a "
                "process per GPU (hvdtrain run -np N)."
            )
        self._backend.check_model(self._model)

    def _replace(self, **methods: Callable[..., Any]) -> None:
        """Replace methods of the model. ``_remove_earlier`` restores the original methods."""
        for name, method in methods.items():
            set_untracked(self._model, name, method)
        set_untracked(self._model, _MARK, [*methods])

    def _remove_earlier(self) -> None:
        for name in vars(self._model).pop(_MARK, []):
            vars(self._model).pop(name, None)

    def _on_change(self, change: Change) -> None:
        for optimizer in optimizers_of(self._model):
            rescale_rate(optimizer, len(change.before), len(change.now))

    def _synchronized_layers(self) -> list[Any]:
        """Return the layers that compute mean and variance over the samples of all ranks."""
        layers = synchronized_layers(self._model)
        if layers and self._settings.towers > 1:
            self._warn_once(
                "BatchNormalization(synchronized=True) normalizes the part of each tower "
                "separately, because the towers compute one after another."
            )
            return []
        return layers

    def _warn_once(self, text: str | None) -> None:
        if text and self._membership.is_chief and text not in self._warned:
            self._warned.add(text)
            logger.warning(text)
