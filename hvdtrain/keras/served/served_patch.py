"""The patch that ``distribute`` puts into a model that trains through parameter servers."""

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
from hvdtrain.keras.batch_normalization import synchronized_layers
from hvdtrain.keras.fit_inputs import FitInputs
from hvdtrain.keras.fit_loop import FitLoop, reset_functions
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.model_patch import ModelPatch
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.model_sync import broadcast_weights
from hvdtrain.keras.optimizer_patch import mark_distributed
from hvdtrain.keras.rank_random import draw_seed, reseed_by_rank
from hvdtrain.keras.served.gradient_exchange import (
    GradientExchange,
    WorkerLossWeights,
    refuse_training,
)
from hvdtrain.keras.served.served_fit import ServedJob, serve
from hvdtrain.keras.served.server_shards import shard_model
from hvdtrain.keras.served.worker_fit import WorkerFit
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import RESULTS, SYMBOLIC_BUILD

__all__ = ["ServedModelPatch"]


class ServedModelPatch(ModelPatch):
    """Replaces the methods of a model in a job in which some ranks are parameter servers.

    Within ``fit`` a worker is by itself but for the servers; outside of it all ranks, servers
    too, evaluate and predict together.
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
        self._settings = settings
        self._roles = roles
        # What a worker's optimizer applies is no matter of how many ranks there are.
        self._membership = Membership(collectives, settings.min_np)
        self._alone = single_engine()
        self._reducer = GradientReducer(EngineRanks(self._alone))

    def install(self) -> None:
        """Let the model train; collective."""
        model, collectives = self._model, self._collectives
        self._remove_earlier()
        seed = draw_seed(collectives)
        if synchronized_layers(model):
            self._warn_once(
                "BatchNormalization(synchronized=True) normalizes each worker's batch by itself "
                "where there are parameter servers."
            )
        messages = collectives.messages()
        report.watch(lambda: messages.waiting_in or collectives.waiting_in)
        shards = shard_model(model, collectives, self._roles, self._settings)
        weights = WorkerLossWeights(self._reducer, gathers=self._settings.gathers)
        steps = ModelSteps(model, self._reducer, self._choose_compute(), weights)
        job = ServedJob(
            model=model,
            collectives=collectives,
            membership=self._membership,
            messages=messages,
            reducer=self._reducer,
            steps=steps,
            settings=self._settings,
            shards=shards,
            presharded=self._presharded,
        )
        joint = FitLoop(
            model,
            collectives,
            membership=self._membership,
            inputs=self._inputs(collectives, self._membership, seed),
            reducer=self._reducer,
            steps=steps,
        )
        if self._serves:
            mark_distributed(model.optimizer, None)
            self._replace_methods(steps, joint, fit=partial(serve, job), now=lambda: joint)
        else:
            exchange = GradientExchange(job)
            exchange.attach(model.optimizer)
            fit = WorkerFit(job, exchange)
            own = self._worker_loop(fit, seed)
            self._replace_methods(
                steps,
                joint,
                fit=partial(fit.run, own),
                now=lambda: joint if exchange.client is None else own,
            )
        reset_functions(model)
        broadcast_weights(model, collectives)
        reseed_by_rank(model, collectives)

    def _worker_loop(self, fit: WorkerFit, seed: int) -> FitLoop:
        """Returns what a worker runs by itself within ``fit``."""
        return FitLoop(
            self._model,
            self._alone,
            membership=fit.worker,
            inputs=self._inputs(self._alone, fit.worker, seed),
            reducer=self._reducer,
            steps=fit.job.steps,
            whole=self._inputs(self._alone, Membership(self._alone, min_np=1), seed),
            begin=fit.begin,
            begin_session=fit.session,
        )

    def _replace_methods(
        self,
        steps: ModelSteps,
        joint: FitLoop,
        *,
        fit: Callable[[inspect.BoundArguments], Any],
        now: Callable[[], FitLoop],
    ) -> None:
        """Put hvdtrain's methods into the model, for Keras' loops and outside of them.

        Args:
            steps: What Keras' loops run on each batch.
            joint: What all ranks run outside of ``fit``.
            fit: Takes the place of ``fit``, with its arguments.
            now: Returns the loop that this rank is in.
        """
        signature = inspect.signature(joint.fit)
        detail = (f"model {self._collectives.sections}",)

        def fit_ours(*args: Any, **options: Any) -> Any:
            with self._collectives.section("fit", detail):
                joint.check_still_distributed()
                return fit(signature.bind(*args, **options))

        hooks: dict[str, Callable[..., Any]] = {
            RESULTS: lambda logs: now().joint_results(logs),
            SYMBOLIC_BUILD: lambda *args, **options: now().symbolic_build(*args, **options),
        }
        self._replace(
            train_step=steps.train,
            train_on_batch=lambda *args, **options: refuse_training(),
            test_step=steps.test,
            predict_step=steps.predict,
            fit=fit_ours,
            evaluate=lambda *args, **options: now().evaluate(*args, **options),
            predict=lambda *args, **options: now().predict(*args, **options),
            make_predict_function=joint.make_predict_function,
            **hooks,
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

    @property
    def _serves(self) -> bool:
        return self._collectives.member in self._roles.servers
