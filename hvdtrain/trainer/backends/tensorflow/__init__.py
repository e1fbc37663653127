"""The steps of a model with Keras' TensorFlow backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.frameworks.tensorflow.devices import tower_devices
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.backends.tensorflow.model_steps import Compute, ModelSteps
from hvdtrain.trainer.backends.tensorflow.one_device import OneDevice
from hvdtrain.trainer.backends.tensorflow.towers import Towers
from hvdtrain.trainer.model_parts import overrides

__all__ = ["check_model", "choose_compute", "make_steps"]


def check_model(model: keras.Model) -> None:
    """Check that the model was created outside the scope of a ``tf.distribute`` strategy.

    Raises:
        ModelError: If the model belongs to a strategy.
    """
    strategy = model.distribute_strategy
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        raise ModelError(
            f"The model {model.name!r} belongs to tf.distribute's {type(strategy).__name__}; "
            "create and distribute the model outside of the strategy's scope, because hvdtrain "
            "starts a process per GPU (hvdtrain run -np N). To use several GPUs in one process, "
            "use --mode towers --devices-per-rank N."
        )


def make_steps(
    model: keras.Model,
    reducer: GradientReducer,
    settings: Settings,
    *,
    synchronized: Sequence[Any],
    warn: Callable[[str | None], None],
) -> ModelSteps:
    """Create the steps of a model, as ``interface.Backend`` describes."""
    compute = choose_compute(model, settings, warn)
    return ModelSteps(model, reducer, compute, synchronized=synchronized)


def choose_compute(
    model: keras.Model, settings: Settings, warn: Callable[[str | None], None]
) -> Compute:
    """Choose the devices on which this rank computes."""
    devices = tower_devices(settings.towers)
    if len(devices) > 1:
        if model.jit_compile:
            warn("XLA compiles for one device; towers run without jit_compile.")
        return Towers(model, devices)
    if model.jit_compile and overrides(model, "train_step"):
        warn(
            "This model's own train_step can't be split around the collectives; jit_compile "
            "applies only to its optimizers' updates."
        )
    return OneDevice(model)
