"""``ModelPatch``, the methods that ``distribute`` replaces on a model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import keras

from hvdtrain.collectives.engine import Engine
from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.private_api.keras import set_untracked
from hvdtrain.trainer import backends
from hvdtrain.trainer.callback_list import list_callbacks
from hvdtrain.trainer.fit_inputs import FitInputs
from hvdtrain.trainer.fit_loop import reset_functions
from hvdtrain.trainer.membership import Change, Membership
from hvdtrain.trainer.rank_random import draw_seed, reseed_by_rank
from hvdtrain.trainer.saving.checkpoint_callback import find_checkpoint_callback

__all__ = ["ModelPatch", "Strategy"]

logger = logging.getLogger(__package__)

_MARK = "_hvdtrain_methods"


class Strategy(Protocol):
    """What a mode of training changes on a model. Each model has its own strategy."""

    def install(self, patch: ModelPatch) -> None:
        """Replace the model's methods, and synchronize its weights. All ranks must call this."""

    def on_change(self, model: keras.Model, change: Change) -> None:
        """Adapt the model after an elastic job has lost ranks."""


class ModelPatch:
    """Replaces methods of one model object. The model's class is not changed.

    ``strategy`` determines which methods are replaced, and by what.
    """

    def __init__(
        self,
        model: keras.Model,
        collectives: Engine,
        settings: Settings,
        strategy: Strategy,
        *,
        presharded: bool,
    ) -> None:
        self.model = model
        self.collectives = collectives
        self.settings = settings
        self.presharded = presharded
        on_change = partial(strategy.on_change, model)
        self.membership = Membership(collectives, settings.min_np, [on_change])
        self._strategy = strategy
        self._seed = 0
        self._warned: set[str] = set()

    def install(self) -> None:
        """Make the model train on all ranks together. All ranks must call this.

        Raises:
            ModelError: If Keras already distributes the model over devices.
        """
        self._remove_earlier()
        self._check_model()
        self._seed = draw_seed(self.collectives)
        self._strategy.install(self)
        reset_functions(self.model)
        reseed_by_rank(self.model, self.collectives)

    def install_with_checkpoint(self) -> None:
        """Wait until ``fit`` receives a ``Checkpoint`` callback, then call ``install``."""
        self._remove_earlier()
        plain_fit = self.model.fit

        def fit(*args: Any, **options: Any) -> Any:
            arguments = inspect.signature(plain_fit).bind(*args, **options).arguments
            if find_checkpoint_callback(list_callbacks(arguments.get("callbacks"))) is None:
                return plain_fit(*args, **options)
            self.install()
            return self.model.fit(*args, **options)

        self.replace(fit=fit)

    def replace(self, **methods: Callable[..., Any]) -> None:
        """Replace methods of the model until the next ``distribute``."""
        for name, method in methods.items():
            set_untracked(self.model, name, method)
        set_untracked(self.model, _MARK, [*methods])

    def inputs(
        self, collectives: Engine, membership: Membership, *, ignore_rows: bool = False
    ) -> FitInputs:
        """Return the object that divides the data of ``fit`` among the ranks of ``membership``."""
        return FitInputs(
            collectives,
            membership,
            seed=self._seed,
            presharded=self.presharded,
            warn=self.warn_once,
            ignore_rows=ignore_rows,
        )

    def warn_once(self, text: str | None) -> None:
        """Log a warning on the chief, unless it was logged before."""
        if text and self.membership.is_chief and text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    def _remove_earlier(self) -> None:
        for name in vars(self.model).pop(_MARK, []):
            vars(self.model).pop(name, None)

    def _check_model(self) -> None:
        """Raise ``ModelError`` if Keras itself would combine gradients over devices."""
        if keras.distribution.distribution() is not None:
            raise ModelError(
                "keras.distribution is set, so Keras would combine gradients over devices a second "
                "time. Leave out keras.distribution.set_distribution(…), because hvdtrain starts a "
                "process per GPU (hvdtrain run -np N)."
            )
        backends.of_keras().check_model(self.model)
