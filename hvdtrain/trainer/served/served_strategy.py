"""``ParameterServers``, the strategy of a job with parameter servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from hvdtrain.cluster.roles import Roles
from hvdtrain.collectives.engine import single_engine
from hvdtrain.gradients.ranks import EngineRanks
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.monitor import report
from hvdtrain.parameter_server.published_weights import share_memory
from hvdtrain.parameter_server.shard_optimizer import check_optimizer, unsplittable_variables
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.private_api.keras import RESULTS, SYMBOLIC_BUILD
from hvdtrain.trainer.backends.tensorflow import choose_compute
from hvdtrain.trainer.backends.tensorflow.model_steps import ModelSteps
from hvdtrain.trainer.batch_normalization import synchronized_layers
from hvdtrain.trainer.fit_loop import FitLoop
from hvdtrain.trainer.membership import Change, Membership
from hvdtrain.trainer.model_patch import ModelPatch
from hvdtrain.trainer.model_sync import broadcast_weights
from hvdtrain.trainer.optimizer_patch import mark_distributed, remove_mixins
from hvdtrain.trainer.served.gradient_exchange import (
    GradientExchange,
    WorkerLossWeights,
    refuse_training,
)
from hvdtrain.trainer.served.served_fit import ServedJob, serve
from hvdtrain.trainer.served.worker_fit import WorkerFit

__all__ = ["ParameterServers"]


class ParameterServers:
    """The strategy in which parameter servers apply the gradients of workers.

    Within ``fit`` a worker communicates only with the servers. All ranks, including servers,
    evaluate and predict together.
    """

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._alone = single_engine()
        self._reducer = GradientReducer(EngineRanks(self._alone))

    def on_change(self, model: keras.Model, change: Change) -> None:
        """Do nothing. A worker's learning rate doesn't depend on the number of ranks."""

    def install(self, patch: ModelPatch) -> None:
        """Replace the model's methods. All ranks must call this."""
        model, collectives = patch.model, patch.collectives
        job = self._make_job(patch)
        serves = collectives.member in self._roles.servers
        inputs = partial(patch.inputs, ignore_rows=serves and patch.presharded)
        joint = FitLoop(
            model,
            collectives,
            membership=patch.membership,
            inputs=inputs(collectives, patch.membership),
            reducer=self._reducer,
            steps=job.steps,
        )
        if serves:
            mark_distributed(model.optimizer, None)
            _replace_methods(patch, job, joint, fit=partial(serve, job), current=lambda: joint)
        else:
            exchange = GradientExchange(job)
            exchange.attach(model.optimizer)
            fit = WorkerFit(job, exchange)
            own = FitLoop(
                model,
                self._alone,
                membership=fit.membership,
                inputs=inputs(self._alone, fit.membership),
                reducer=self._reducer,
                steps=job.steps,
                whole=inputs(self._alone, Membership(self._alone, min_np=1)),
                begin=fit.begin,
                begin_session=fit.session,
            )
            _replace_methods(
                patch,
                job,
                joint,
                fit=partial(fit.run, own),
                current=lambda: own if exchange.in_fit else joint,
            )
        broadcast_weights(model, collectives)

    def _make_job(self, patch: ModelPatch) -> ServedJob:
        """Divide the variables among the servers. All ranks must call this."""
        model, collectives, settings = patch.model, patch.collectives, patch.settings
        if synchronized_layers(model):
            patch.warn_once(
                "BatchNormalization(synchronized=True) normalizes each worker's batch separately "
                "with parameter servers."
            )
        messages = collectives.messages()
        report.watch(lambda: messages.waiting_in or collectives.waiting_in)
        remove_mixins(model.optimizer)  # its class decides what can be split
        check_optimizer(model.optimizer, len(self._roles.servers))
        variables = model.trainable_variables
        specs, whole = specs_of(variables), unsplittable_variables(model.optimizer, variables)
        shards = shard_variables(specs, len(self._roles.servers), whole)
        memory = share_memory(collectives, self._roles.servers, shards)
        weights = WorkerLossWeights(self._reducer, gathers=settings.gathers)
        compute = choose_compute(model, settings, patch.warn_once)
        return ServedJob(
            model=model,
            collectives=collectives,
            membership=patch.membership,
            messages=messages,
            reducer=self._reducer,
            steps=ModelSteps(model, self._reducer, compute, weights),
            settings=settings,
            roles=self._roles,
            specs=specs,
            shards=shards,
            memory=memory,
        )


def _replace_methods(
    patch: ModelPatch,
    job: ServedJob,
    joint: FitLoop,
    *,
    fit: Callable[[inspect.BoundArguments], Any],
    current: Callable[[], FitLoop],
) -> None:
    """Replace the model's methods. ``current`` returns the running ``FitLoop``."""
    signature = inspect.signature(joint.fit)
    detail = (f"model {patch.collectives.sections}",)

    def fit_in_section(*args: Any, **options: Any) -> Any:
        with patch.collectives.section("fit", detail):
            joint.check_still_distributed()
            return fit(signature.bind(*args, **options))

    def in_current(method: str) -> Callable[..., Any]:
        return lambda *args, **options: getattr(current(), method)(*args, **options)

    hooks = {RESULTS: "joint_results", SYMBOLIC_BUILD: "symbolic_build"}
    patch.replace(
        **job.steps.methods(),
        train_on_batch=refuse_training,
        fit=fit_in_section,
        evaluate=in_current("evaluate"),
        predict=in_current("predict"),
        **{name: in_current(method) for name, method in hooks.items()},
    )
