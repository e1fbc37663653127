"""``hvdtrain.distribute(model)``: a compiled Keras model trains on all ranks together."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.tape import check_mode
from hvdtrain.keras.deferred_build import check_built, forget, is_built, postpone
from hvdtrain.keras.local_sgd.local_patch import LocalModelPatch
from hvdtrain.keras.model_comparison import check_same_model
from hvdtrain.keras.model_parts import has_own_call, optimizers_of, plain_optimizers_of
from hvdtrain.keras.model_patch import ModelPatch
from hvdtrain.keras.optimizer_patch import distribute_optimizer
from hvdtrain.private_api import keras as private_keras

__all__ = ["DistributedOptimizer", "distribute"]


def distribute(model: keras.Model, *, presharded: bool = False) -> keras.Model:
    """Let ``fit``, ``evaluate`` and ``predict`` of ``model`` work on all ranks together.

    Training on N ranks with ``batch_size=B`` equals training one process on batches of N * B:
    weights, optimizer state and metrics start as the chief's; the input is shared out; gradients
    are averaged, weighted by samples; metrics and losses of an epoch are those of all samples;
    every rank runs the same number of steps. Progress and files come from the chief alone, dropout
    differs by rank, and the model is saved as if hvdtrain had never been there. That is
    so with ``--mode allreduce``; in other modes ranks meet in other ways.

    A ``train_step`` of the model's own may apply several optimizers, as that of a GAN does: those
    that are attributes of the model, or of what is in it.

    Args:
        model: Compiled. One that is not built yet is when it is first given data. Compile again, or
            change what is trainable, and it must be distributed again.
        presharded: Each rank passes its own part of the data, as Horovod's users do, instead of
            the whole.

    Returns:
        The same model.

    Raises:
        ModelError: The model is not compiled, holds parts that are not built and has no call() that
            builds them, or can't be distributed; or ranks have data of their own in an elastic job.
        MismatchError: Ranks have different models; raised on all of them.
    """
    with world.collectives().section("distribute"):
        _check_ready(model)
        forget(model)
        if has_own_call(model) and not is_built(model):
            postpone(model, lambda: _distribute(model, presharded))
        else:
            _distribute(model, presharded)
    return model


def _distribute(model: keras.Model, presharded: bool) -> None:
    collectives = world.collectives()
    settings = world.settings()
    private_keras.check(model, plain_optimizers_of(model))
    check_built(model)
    optimizers = optimizers_of(model)
    if len(optimizers) > 1 and settings.has_servers:
        raise ModelError(
            f"The model {model.name!r} has {len(optimizers)} optimizers, and parameter servers "
            "apply one. Train it with --mode allreduce."
        )
    # Of several each knows its variables when it is first applied.
    if len(optimizers) == 1 and collectives.rank not in world.roles().servers:
        (optimizer,) = optimizers
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    if presharded and collectives.survives_losses:
        raise ModelError(
            "In an elastic job (--elastic) every rank must be given the whole data, so that the "
            "others can do what is left of a lost rank's part. Leave presharded=True out, or use "
            "--max-restarts in place of --elastic."
        )
    if settings.has_servers:
        from hvdtrain.keras.served.served_patch import ServedModelPatch

        roles = world.roles()
        patch: ModelPatch = ServedModelPatch(model, collectives, presharded, settings, roles)
    elif settings.is_local_sgd:
        patch = LocalModelPatch(model, collectives, presharded, settings)
    else:
        patch = ModelPatch(model, collectives, presharded, settings)
    # An outer optimizer changes weights also where there is one rank.
    if collectives.size > 1 or settings.towers > 1 or settings.is_local_sgd:
        check_same_model(model, collectives)
        patch.install()
    else:
        patch.wait_for_checkpoint()


def DistributedOptimizer(optimizer: Any) -> Any:
    """Let an optimizer average gradients over all ranks before it applies them.

    For training loops that call ``optimizer.apply``; ``distribute`` does it for ``fit``.

    Returns:
        The same optimizer, which is saved and loaded as the plain one.

    Raises:
        ModelError: Not a Keras 3 optimizer, or some ranks are parameter servers.
    """
    check_mode("DistributedOptimizer")
    collectives = world.collectives()
    if collectives.size == 1:
        return optimizer
    reducer = GradientReducer.of_job()
    return distribute_optimizer(optimizer, reducer)


def _check_ready(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"hvdtrain.distribute takes a Keras 3 model, received {type(model).__name__}."
        )
    if not model.compiled:
        raise ModelError(
            f"The model {model.name!r} is not compiled. Call model.compile(optimizer=…, loss=…) "
            "before hvdtrain.distribute(model)."
        )
    if not optimizers_of(model):
        raise ModelError(
            f"The model {model.name!r} has no optimizer. Call model.compile(optimizer=…), or make "
            "those that its train_step applies attributes of the model."
        )
