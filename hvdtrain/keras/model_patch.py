"""The model patch, which ``distribute`` puts into a model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.batch_normalization import (
    synchronize_batch_normalization,
    synchronized_layers,
)
from hvdtrain.keras.callback_list import list_callbacks
from hvdtrain.keras.compute import Compute, OneDevice, Towers
from hvdtrain.keras.fit_inputs import FitInputs
from hvdtrain.keras.fit_loop import FitLoop, reset_functions
from hvdtrain.keras.learning_rate import prepare_rescaling, rescale_rate
from hvdtrain.keras.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.keras.membership import Change, Membership
from hvdtrain.keras.model_parts import optimizers_of, overrides, refuse_strategy
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.model_sync import broadcast_model
from hvdtrain.keras.optimizer_patch import distribute_optimizer
from hvdtrain.keras.rank_random import draw_seed, reseed_by_rank
from hvdtrain.keras.saving.checkpoint_callback import find_checkpoint_callback
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import RESULTS, SYMBOLIC_BUILD, set_untracked
from hvdtrain.tensorflow.devices import tower_devices

__all__ = ["ModelPatch"]

logger = logging.getLogger(__package__)

_MARK = "_hvdtrain_methods"


class ModelPatch:
    """Replaces the methods of one model's instance; its class stays as it is."""

    def __init__(
        self, model: keras.Model, collectives: Engine, presharded: bool, settings: Settings
    ) -> None:
        self._model = model
        self._collectives = collectives
        self._membership = Membership(collectives, settings.min_np, [self._follow])
        self._presharded = presharded
        self._reducer = GradientReducer.of_job()
        self._devices = tower_devices(settings.towers)
        self._noticed: set[str] = set()
        self._averaging: WeightAveraging | None = None

    def install(self) -> None:
        """Let the model train on all ranks together; collective."""
        model, collectives = self._model, self._collectives
        self._remove_earlier()
        refuse_strategy(model)
        seed = draw_seed(collectives)
        compute = self._choose_compute()
        for optimizer in optimizers_of(model):
            self._distribute(optimizer)
            if self._membership.elastic:
                prepare_rescaling(optimizer)
        steps = self._make_steps(compute)
        for layer in self._choose_synchronized():
            synchronize_batch_normalization(layer, collectives, lambda: steps.step_rows)
        inputs = FitInputs(
            collectives,
            self._membership,
            seed=seed,
            presharded=self._presharded,
            notice=self._notice,
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
            SYMBOLIC_BUILD: loops.adopt,
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

    def wait_for_checkpoint(self) -> None:
        """Leave the model on the only rank as it is, until a ``fit`` is to be saved or resumed."""
        self._remove_earlier()
        plain_fit = self._model.fit

        def fit(*args: Any, **options: Any) -> Any:
            given = inspect.signature(plain_fit).bind(*args, **options).arguments
            if find_checkpoint_callback(list_callbacks(given.get("callbacks"))) is None:
                return plain_fit(*args, **options)
            self.install()
            return self._model.fit(*args, **options)

        self._replace(fit=fit)

    def _distribute(self, optimizer: Any) -> None:
        """Let an optimizer of the model update all ranks' weights alike."""
        distribute_optimizer(optimizer, self._reducer)

    def _make_steps(self, compute: Compute) -> ModelSteps:
        """Returns the steps that Keras' loops run on each batch."""
        layers = self._choose_synchronized()
        return ModelSteps(self._model, self._reducer, compute, synchronized=layers)

    def _replace(self, **methods: Callable[..., Any]) -> None:
        """Put methods in the place of the model's own, until ``_remove_earlier``."""
        for name, method in methods.items():
            set_untracked(self._model, name, method)
        set_untracked(self._model, _MARK, [*methods])

    def _follow(self, change: Change) -> None:
        for optimizer in optimizers_of(self._model):
            rescale_rate(optimizer, len(change.before), len(change.now))

    def _remove_earlier(self) -> None:
        for name in vars(self._model).pop(_MARK, []):
            vars(self._model).pop(name, None)

    def _choose_synchronized(self) -> list[Any]:
        """The layers that are to normalize with the samples of all ranks."""
        layers = synchronized_layers(self._model)
        if layers and len(self._devices) > 1:
            self._notice(
                "BatchNormalization(synchronized=True) normalizes each tower's part of a batch by "
                "itself, as one tower's pass comes after another's."
            )
            return []
        return layers

    def _choose_compute(self) -> Compute:
        jit = self._choose_jit()
        if len(self._devices) > 1:
            return Towers(self._model, self._devices)
        return OneDevice(self._model, jit)

    def _choose_jit(self) -> bool:
        """Take compilation away from Keras, which would compile the communication as well."""
        model = self._model
        jit = bool(model.jit_compile)
        model.jit_compile = False
        obstacles = (
            (
                len(self._devices) > 1,
                "XLA compiles for one device; with towers this runs without jit_compile.",
            ),
            (
                overrides(model, "train_step"),
                "This model has a train_step of its own, which can't be split around the "
                "communication; it runs without jit_compile.",
            ),
        )
        found = [text for applies, text in obstacles if applies]
        if jit and found:
            self._notice(found[0])
        return jit and not found

    def _notice(self, text: str | None) -> None:
        if text and self._membership.is_chief and text not in self._noticed:
            self._noticed.add(text)
            logger.warning(text)
