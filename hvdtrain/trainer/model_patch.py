"""The methods that ``distribute`` replaces on a model."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.frameworks.tensorflow.devices import tower_devices
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import RESULTS, SYMBOLIC_BUILD, set_untracked
from hvdtrain.trainer.batch_normalization import (
    synchronize_batch_normalization,
    synchronized_layers,
)
from hvdtrain.trainer.callback_list import list_callbacks
from hvdtrain.trainer.compute import Compute, OneDevice, Towers
from hvdtrain.trainer.fit_inputs import FitInputs
from hvdtrain.trainer.fit_loop import FitLoop, reset_functions
from hvdtrain.trainer.learning_rate import prepare_rescaling, rescale_rate
from hvdtrain.trainer.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.trainer.membership import Change, Membership
from hvdtrain.trainer.model_parts import optimizers_of, overrides
from hvdtrain.trainer.model_steps import ModelSteps
from hvdtrain.trainer.model_sync import broadcast_model
from hvdtrain.trainer.optimizer_patch import distribute_optimizer
from hvdtrain.trainer.rank_random import draw_seed, reseed_by_rank
from hvdtrain.trainer.saving.checkpoint_callback import find_checkpoint_callback

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
        self._devices = tower_devices(settings.towers)
        self._warned: set[str] = set()
        self._averaging: WeightAveraging | None = None

    def install(self) -> None:
        """Make the model train on all ranks together. All ranks must call this.

        Raises:
            ModelError: If the model belongs to a ``tf.distribute`` strategy.
        """
        model, collectives = self._model, self._collectives
        self._remove_earlier()
        _check_no_strategy(model)
        seed = draw_seed(collectives)
        compute = self._choose_compute()
        for optimizer in optimizers_of(model):
            self._distribute(optimizer)
            if self._membership.elastic:
                prepare_rescaling(optimizer)
        steps = self._make_steps(compute)
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
            train_step=steps.train,
            test_step=steps.test,
            predict_step=steps.predict,
            fit=loops.fit,
            evaluate=loops.evaluate,
            predict=loops.predict,
            make_predict_function=loops.make_predict_function,
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

    def _make_steps(self, compute: Compute) -> ModelSteps:
        return ModelSteps(
            self._model, self._reducer, compute, synchronized=self._synchronized_layers()
        )

    def _replace(self, **methods: Callable[..., Any]) -> None:
        """Replace methods of the model. ``_remove_earlier`` restores the original methods."""
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            if "train_step" in methods:
                plain = methods.get(name, getattr(self._model, name))
                methods[name] = _without_jit(self._model, plain)
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
        if layers and len(self._devices) > 1:
            self._warn_once(
                "BatchNormalization(synchronized=True) normalizes the part of each tower "
                "separately, because the towers compute one after another."
            )
            return []
        return layers

    def _choose_compute(self) -> Compute:
        """Choose the devices on which this rank computes."""
        model = self._model
        if len(self._devices) > 1:
            if model.jit_compile:
                self._warn_once("XLA compiles for one device; towers run without jit_compile.")
            return Towers(model, self._devices)
        if model.jit_compile and overrides(model, "train_step"):
            self._warn_once(
                "This model's own train_step can't be split around the collectives; jit_compile "
                "applies only to its optimizers' updates."
            )
        return OneDevice(model)

    def _warn_once(self, text: str | None) -> None:
        if text and self._membership.is_chief and text not in self._warned:
            self._warned.add(text)
            logger.warning(text)


def _without_jit(model: keras.Model, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``make`` with the model's ``jit_compile`` switched off.

    With ``jit_compile``, Keras would compile a whole step, including its collectives, which XLA
    doesn't support.
    """

    @functools.wraps(make)
    def make_uncompiled(*args: Any, **options: Any) -> Any:
        jit, model.jit_compile = model.jit_compile, False
        try:
            return make(*args, **options)
        finally:
            model.jit_compile = jit

    return make_uncompiled


def _check_no_strategy(model: keras.Model) -> None:
    if keras.distribution.distribution() is not None:
        raise ModelError(
            "keras.distribution is set, so Keras would combine gradients over devices a second "
            "time. Leave out keras.distribution.set_distribution(…), because hvdtrain starts a "
            "process per GPU (hvdtrain run -np N)."
        )
    strategy = model.distribute_strategy
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        raise ModelError(
            f"The model {model.name!r} belongs to tf.distribute's {type(strategy).__name__}; "
            "create and distribute the model outside of the strategy's scope, because hvdtrain "
            "starts a process per GPU (hvdtrain run -np N). To use several GPUs in one process, "
            "use --mode towers --devices-per-rank N."
        )
