"""What ``distribute`` puts into a model that trains through parameter servers."""

from __future__ import annotations

import inspect
import random
from typing import Any

import keras

from hvdtrain.cluster.roles import Roles
from hvdtrain.collectives.interface import Collectives
from hvdtrain.collectives.single import single_collectives
from hvdtrain.config import Settings
from hvdtrain.gradients.ranks import EngineRanks
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.batch_normalization import RowFlag, synchronized_layers
from hvdtrain.keras.fit_inputs import FitInputs
from hvdtrain.keras.fit_loop import FitLoop, forget_functions
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.model_patch import ModelPatch
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.model_sync import broadcast_weights, reseed_by_rank
from hvdtrain.keras.optimizer_patch import mark, unmix
from hvdtrain.keras.served.elastic_averaging import (
    ElasticExchange,
    check_elastic,
    servers_optimizer,
)
from hvdtrain.keras.served.gradient_exchange import GradientExchange
from hvdtrain.keras.served.independent_worker import IndependentWorker
from hvdtrain.keras.served.served_fit import ServedFit, Shares
from hvdtrain.keras.served.server_optimizer_state import ServerOptimizerState, check_averages
from hvdtrain.keras.served.worker_link import WorkerLink, refuse_training
from hvdtrain.keras.served.worker_loss_weights import WorkerLossWeights
from hvdtrain.keras.served.worker_optimizer import (
    average_elastically,
    leave_updates_to_servers,
)
from hvdtrain.monitor import report
from hvdtrain.parameter_server.shard_optimizer import check_optimizer, stays_whole
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.shared_memory import share_memory

__all__ = ["ServedModelPatch"]

# Of all workers together on the center: beta in Zhang et al. 2015, arXiv 1412.6651.
DEFAULT_FORCE = 0.9


class ServedModelPatch(ModelPatch):
    """As ``ModelPatch``, for jobs in which some ranks are parameter servers.

    Within ``fit`` a worker is by itself but for the servers; outside of it all ranks, servers
    too, evaluate and predict together.

    Args:
        model: Compiled and built.
        collectives: Of all ranks.
        presharded: Whether each worker passes data of its own.
        settings: Of this job.
        roles: Of the ranks.
    """

    def __init__(
        self,
        model: keras.Model,
        collectives: Collectives,
        presharded: bool,
        settings: Settings,
        roles: Roles,
    ) -> None:
        super().__init__(model, collectives, presharded, settings)
        self._settings = settings
        self._roles = roles
        # What a worker's optimizer applies is no matter of how many ranks there are.
        self._membership = Membership(collectives, settings.min_np)
        self._alone = single_collectives()
        self._reducer = GradientReducer(EngineRanks(self._alone))

    def install(self) -> None:
        """Let the model train; collective."""
        model, collectives = self._model, self._collectives
        self._remove_earlier()
        seed = collectives.broadcast_object(random.getrandbits(31), name="seed")
        if synchronized_layers(model):
            self._notice(
                "BatchNormalization(synchronized=True) normalizes each worker's batch by itself "
                "where there are parameter servers."
            )
        messages = collectives.messages()
        report.watch(lambda: messages.waiting_in or collectives.waiting_in)
        shares = self._share()
        weights = WorkerLossWeights(self._reducer, gathers=self._settings.gathers)
        steps = ModelSteps(model, self._reducer, self._choose_compute(), RowFlag(), weights)
        served = ServedFit(
            model,
            collectives,
            self._membership,
            messages,
            steps,
            settings=self._settings,
            shares=shares,
            presharded=self._presharded,
        )
        together = FitLoop(
            model,
            collectives,
            membership=self._membership,
            inputs=self._inputs(collectives, self._membership, seed),
            reducer=self._reducer,
            steps=steps,
        )
        if self._serves:
            mark(model.optimizer, None)
            self._replace_methods(steps, served, together)
        else:
            exchange = self._link(steps, shares.state)
            place = IndependentWorker(collectives.member, self._roles.workers)
            apart = self._loops_apart(place, steps, served, exchange, seed)
            self._replace_methods(steps, served, together, (apart, place, exchange))
        forget_functions(model)
        broadcast_weights(model, collectives)
        reseed_by_rank(model, collectives)

    def _link(self, steps: ModelSteps, state: ServerOptimizerState) -> WorkerLink:
        """Connect the optimizer of a worker with the servers, which have ``state``."""
        model, settings = self._model, self._settings
        is_chief = self._collectives.rank == 0
        averages = state if is_chief and state.has_averages else None
        require_finite = settings.non_finite == "error"
        if settings.mode == "easgd":
            rate = settings.moving_rate or DEFAULT_FORCE / len(self._roles.workers)
            elastic = ElasticExchange(
                model,
                self._reducer,
                steps,
                require_finite=require_finite,
                every=settings.push_every,
                rate=rate,
                averages=averages,
            )
            average_elastically(model.optimizer, elastic)
            return elastic
        exchange = GradientExchange(
            model,
            self._reducer,
            steps,
            is_chief=is_chief,
            require_finite=require_finite,
            push_every=settings.push_every,
            overlaps=settings.overlap,
            averages=averages,
        )
        leave_updates_to_servers(model.optimizer, exchange)
        return exchange

    def _loops_apart(
        self,
        place: IndependentWorker,
        steps: ModelSteps,
        served: ServedFit,
        exchange: WorkerLink,
        seed: int,
    ) -> FitLoop:
        """What a worker runs within ``fit``."""
        return FitLoop(
            self._model,
            self._alone,
            membership=place,
            inputs=self._inputs(self._alone, place, seed),
            reducer=self._reducer,
            steps=steps,
            whole=self._inputs(self._alone, Membership(self._alone, min_np=1), seed),
            begin=lambda: served.begin(exchange),
            begin_session=served.session,
        )

    def _replace_methods(
        self,
        steps: ModelSteps,
        served: ServedFit,
        together: FitLoop,
        of_worker: tuple[FitLoop, IndependentWorker, WorkerLink] | None = None,
    ) -> None:
        """Put hvdtrain's methods into the model.

        Args:
            steps: What Keras' loops run on each batch.
            served: What ``fit`` is.
            together: What all ranks run outside of ``fit``.
            of_worker: What a worker runs within it, its place among all, and its exchange with
                the servers; None on a server.
        """
        signature = inspect.signature(together.fit)

        def fit(*args: Any, **options: Any) -> Any:
            together.check_still_ours()
            arguments = signature.bind(*args, **options)
            if of_worker is None:
                return served.serve(arguments)
            return served.train(*of_worker, arguments)

        def now() -> FitLoop:
            if of_worker is None:
                return together
            apart, _, exchange = of_worker
            return together if exchange.client is None else apart

        self._replace(
            train_step=steps.train,
            train_on_batch=lambda *args, **options: refuse_training(),
            test_step=steps.test,
            predict_step=steps.predict,
            fit=fit,
            evaluate=lambda *args, **options: now().evaluate(*args, **options),
            predict=lambda *args, **options: now().predict(*args, **options),
            make_predict_function=together.make_predict_function,
            _get_metrics_result_or_logs=lambda logs: now().joint_results(logs),
            _maybe_symbolic_build=lambda *args, **options: now().adopt(*args, **options),
        )

    def _inputs(self, between: Collectives, membership: Membership, seed: int) -> FitInputs:
        return FitInputs(
            between,
            membership,
            seed=seed,
            presharded=self._presharded,
            notice=self._notice,
            watches=self._serves and self._presharded,
        )

    @property
    def _serves(self) -> bool:
        return self._collectives.member in self._roles.servers

    def _share(self) -> Shares:
        """Cut the model's variables for the servers; collective."""
        model, servers = self._model, len(self._roles.servers)
        unmix(model.optimizer)  # what can be cut goes by its class
        optimizer = model.optimizer
        elastic = self._settings.mode == "easgd"
        check_averages(optimizer, elastic=elastic)
        if elastic:
            check_elastic(model)
            optimizer = servers_optimizer(model)
        check_optimizer(optimizer, servers)
        variables = model.trainable_variables
        specs = specs_of(variables)
        shards = shard_variables(specs, servers, stays_whole(optimizer, variables))
        memory = share_memory(
            self._collectives,
            self._roles.servers,
            shards,
            # What is read may be newer than the answer's, and to compensate a server must know it.
            readable=not self._settings.dc_asgd,
        )
        return Shares(
            roles=self._roles,
            specs=specs,
            shards=shards,
            memory=memory,
            state=ServerOptimizerState(model.optimizer, optimizer, shards),
        )
