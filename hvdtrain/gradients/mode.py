"""The check that the job's mode supports a function of custom training loops."""

from __future__ import annotations

from hvdtrain import world
from hvdtrain.errors import ModelError

__all__ = ["check_mode"]


def check_mode(what: str, *, gradients: bool = True) -> None:
    """Check that a public function can be used in the job's mode.

    ``gradients`` says whether the function averages gradients.

    Raises:
        ModelError: If some ranks are parameter servers. Also if the function averages gradients,
            but the ranks average weights, as in ``--mode local-sgd``.
    """
    settings = world.settings()
    if settings.has_servers:
        raise ModelError(
            f"hvdtrain.{what} does not support mode {settings.mode}, in which some ranks are "
            "parameter servers that only work with model.fit. Train with "
            "hvdtrain.distribute(model) and model.fit, or omit --mode."
        )
    if settings.is_local_sgd and gradients:
        raise ModelError(
            f"hvdtrain.{what} averages gradients in each step, and does not support mode "
            f"{settings.mode}, in which ranks average weights after many steps. Train with "
            "hvdtrain.distribute(model) and model.fit, or omit --mode."
        )
