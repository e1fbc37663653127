"""The methods that are replaced on a model in a job with parameter servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from hvdtrain.cluster.roles import Roles
from hvdtrain.collectives.engine import Engine, single_engine
from hvdtrain.config import Settings
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
from hvdtrain.trainer.fit_inputs import FitInputs
from hvdtrain.trainer.fit_loop import FitLoop, reset_functions
from hvdtrain.trainer.membership import Membership
from hvdtrain.trainer.model_patch import ModelPatch
from hvdtrain.trainer.model_sync import broadcast_weights
from hvdtrain.trainer.optimizer_patch import mark_distributed, remove_mixins
from hvdtrain.trainer.rank_random import draw_seed, reseed_by_rank
from hvdtrain.trainer.served.gradient_exchange import (
    GradientExchange,
    WorkerLossWeights,
    refuse_training,
)
from hvdtrain.trainer.served.served_fit import ServedJob, serve
from hvdtrain.trainer.served.worker_fit import WorkerFit

__all__ = ["ServedModelPatch"]


class ServedModelPatch(ModelPatch):
    """Replaces the methods of a model in a job with parameter servers.

    Within ``fit`` a worker communicates only with the servers. All ranks, including servers,
    evaluate and predict together.
    """

    def __init__(
        self,
        model: keras.Model,
        collectives: Engine,
        presharded: bool,
        settings: Settings,
        roles: Roles,
    ) -> None:
        super().__init__(model, collectives, presharded, settings)
        self._roles = roles
        self._serves = collectives.member in roles.servers
        # No callbacks, because a worker's learning rate does not depend on the number of ranks.
        self._membership = Membership(collectives, settings.min_np)
        self._alone = single_engine()
        self._reducer = GradientReducer(EngineRanks(self._alone))

    def install(self) -> None:
        """Replace the model's methods. All ranks must call this."""
        model, collectives = self._model, self._collectives
        self._remove_earlier()
        seed = draw_seed(collectives)
        if synchronized_layers(model):
            self._warn_once(
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
        weights = WorkerLossWeights(self._reducer, gathers=self._settings.gathers)
        compute = choose_compute(model, self._settings, self._warn_once)
        job = ServedJob(
            model=model,
            collectives=collectives,
            membership=self._membership,
            messages=messages,
            reducer=self._reducer,
            steps=ModelSteps(model, self._reducer, compute, weights),
            settings=self._settings,
            roles=self._roles,
            specs=specs,
            shards=shards,
            memory=memory,
        )
        joint = FitLoop(
            model,
            collectives,
            membership=self._membership,
            inputs=self._inputs(collectives, self._membership, seed),
            reducer=self._reducer,
            steps=job.steps,
        )
        if self._serves:
            mark_distributed(model.optimizer, None)
            self._replace_methods(job, joint, fit=partial(serve, job), current=lambda: joint)
        else:
            exchange = GradientExchange(job)
            exchange.attach(model.optimizer)
            fit = WorkerFit(job, exchange)
            own = FitLoop(
                model,
                self._alone,
                membership=fit.membership,
                inputs=self._inputs(self._alone, fit.membership, seed),
                reducer=self._reducer,
                steps=job.steps,
                whole=self._inputs(self._alone, Membership(self._alone, min_np=1), seed),
                begin=fit.begin,
                begin_session=fit.session,
            )
            self._replace_methods(
                job,
                joint,
                fit=partial(fit.run, own),
                current=lambda: own if exchange.in_fit else joint,
            )
        reset_functions(model)
        broadcast_weights(model, collectives)
        reseed_by_rank(model, collectives)

    def _replace_methods(
        self,
        job: ServedJob,
        joint: FitLoop,
        *,
        fit: Callable[[inspect.BoundArguments], Any],
        current: Callable[[], FitLoop],
    ) -> None:
        """Replace the model's methods.

        ``current`` is a function that returns the ``FitLoop`` in which this rank is at the moment.
        """
        signature = inspect.signature(joint.fit)
        detail = (f"model {self._collectives.sections}",)

        def fit_in_section(*args: Any, **options: Any) -> Any:
            with self._collectives.section("fit", detail):
                joint.check_still_distributed()
                return fit(signature.bind(*args, **options))

        def in_current(method: str) -> Callable[..., Any]:
            return lambda *args, **options: getattr(current(), method)(*args, **options)

        hooks = {RESULTS: "joint_results", SYMBOLIC_BUILD: "symbolic_build"}
        self._replace(
            **job.steps.methods(),
            train_on_batch=refuse_training,
            fit=fit_in_section,
            evaluate=in_current("evaluate"),
            predict=in_current("predict"),
            **{name: in_current(method) for name, method in hooks.items()},
        )

    def _inputs(self, between: Engine, membership: Membership, seed: int) -> FitInputs:
        return FitInputs(
            between,
            membership,
            seed=seed,
            presharded=self._presharded,
            warn=self._warn_once,
            ignore_rows=self._serves and self._presharded,
        )
