"""``fit`` in a job with parameter servers: workers train, servers serve, and all return."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.cluster.roles import Roles
from hvdtrain.collectives.interface import Collectives
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.single import single_collectives
from hvdtrain.config import Settings
from hvdtrain.errors import CollectiveError, Preempted
from hvdtrain.keras.callback_list import list_callbacks
from hvdtrain.keras.chief_failover import CHIEF_ONLY
from hvdtrain.keras.fit_loop import FitLoop
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.model_sync import broadcast_weights
from hvdtrain.keras.saving.checkpoint_callback import find_checkpoint_callback
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession
from hvdtrain.keras.saving.preemption_signals import PreemptionSignals
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.served.independent_worker import IndependentWorker
from hvdtrain.keras.served.served_session import begin_served_session, find_for_all
from hvdtrain.keras.served.server_optimizer_state import ServerOptimizerState
from hvdtrain.keras.served.worker_checkpoints import ServedResume
from hvdtrain.keras.served.worker_link import WorkerLink
from hvdtrain.monitor import report
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.consistency import Asynchronous, Consistency, Synchronous
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.sharding import Shard, Spec
from hvdtrain.parameter_server.shared_memory import SharedMemory
from hvdtrain.parameter_server.update_log import StalenessStats, UpdateLog
from hvdtrain.parameter_server.updates import ShardUpdates
from hvdtrain.parameter_server.variable_table import VariableTable
from hvdtrain.private_api.keras import split_validation

__all__ = ["ServedFit", "Shares"]

logger = logging.getLogger(__package__)

# They decide by validation results, or for all: the chief's decide.
_OF_CHIEF = (
    *CHIEF_ONLY,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Who holds what.

    Attributes:
        roles: Of the ranks.
        specs: Of the trainable variables.
        shards: Of each server.
        memory: What ranks of one host share.
        state: What their optimizers know.
    """

    roles: Roles
    specs: Sequence[Spec]
    shards: Sequence[Shard]
    memory: SharedMemory
    state: ServerOptimizerState


class ServedFit:
    """Takes the place of a model's ``fit``.

    Args:
        model: Compiled and built.
        collectives: Of all ranks.
        membership: Of all ranks.
        messages: Between workers and servers.
        steps: Of the model.
        settings: Of this job.
        shares: Who holds what.
        presharded: Whether each worker passes data of its own.
    """

    def __init__(
        self,
        model: keras.Model,
        collectives: Collectives,
        membership: Membership,
        messages: PointToPoint,
        steps: ModelSteps,
        *,
        settings: Settings,
        shares: Shares,
        presharded: bool,
    ) -> None:
        self._model = model
        self._collectives = collectives
        self._membership = membership
        self._messages = messages
        self._steps = steps
        self._settings = settings
        self._shares = shares
        self._presharded = presharded
        self._resume: ServedResume | None = None
        self._session: CheckpointSession | None = None

    def serve(self, arguments: inspect.BoundArguments) -> Any:
        """What ``fit`` is on a server.

        Args:
            arguments: Of ``fit``.

        Raises:
            Preempted: A signal came to some rank, and a checkpoint was saved.
        """
        workers = self._meet()
        asked = find_checkpoint_callback(list_callbacks(arguments.arguments.get("callbacks")))
        signals = PreemptionSignals()
        if asked is not None:
            state = TrainingState(self._model, single_collectives(), self._steps.samples)
            find_for_all(None, state, self._collectives)
        report.phase("serving")
        roles, memory, settings = self._shares.roles, self._shares.memory, self._settings
        rank = self._collectives.member
        shard = self._shares.shards[roles.servers.index(rank)]
        variables = self._model.trainable_variables
        table = VariableTable(self._shares.state.optimizer, shard, variables)
        with self._update_log(shard) as log:
            updates = ShardUpdates(
                table,
                memory.published[rank],
                scale_by_staleness=settings.staleness_scaling,
                delay_compensation=settings.dc_asgd,
                log=log,
            )
            server = Server(
                self._messages,
                updates,
                memory,
                workers=workers,
                consistency=self._consistency(workers),
                tells_learning_rate=settings.push_every > 1,
                require_finite=settings.non_finite == "error",
                received=lambda: signals.received,
                # Who waits for it would give up otherwise.
                silence_s=min(settings.worker_timeout_s, settings.timeout_s / 2),
                least_workers=settings.min_np - len(roles.servers),
                tell=logger.warning if rank == roles.servers[0] else lambda line: None,
            )
            if asked is not None:
                signals.catch()
            try:
                server.serve()
            finally:
                signals.release(handled=server.ended_by > 0)
        self._end_if_preempted(server.ended_by)
        history = keras.callbacks.History()
        history.set_model(self._model)
        self._end(0, updates.counts, history)
        return history

    def train(
        self,
        loops: FitLoop,
        place: IndependentWorker,
        exchange: WorkerLink,
        arguments: inspect.BoundArguments,
    ) -> Any:
        """What ``fit`` is on a worker.

        Args:
            loops: What it runs by itself.
            place: Of this worker among all.
            exchange: Of its steps.
            arguments: Of ``fit``.

        Raises:
            Preempted: A signal came to some rank, and a checkpoint was saved.
        """
        place.meet(self._meet())
        given = arguments.arguments
        callbacks = list_callbacks(given.get("callbacks"))
        if not self._is_chief:
            # Who validates is the chief; the others go on training meanwhile.
            callbacks = [entry for entry in callbacks if not isinstance(entry, _OF_CHIEF)]
            _train_alone(given)
        asked = find_checkpoint_callback(callbacks)
        if asked is not None:
            self._session, self._resume = begin_served_session(
                asked,
                self._model,
                self._collectives,
                callbacks,
                exchange,
                self._steps,
                place=place,
                servers=self._shares.state,
                in_update=self._settings.gradients_in_update,
                presharded=self._presharded,
            )
        shares = self._shares
        client = Client(
            self._messages,
            shares.specs,
            shares.roles.servers,
            shares.shards,
            shares.memory,
        )

        def finish() -> None:
            exchange.send_rest()
            if asked is not None and asked.session is not None:
                asked.session.finish()
            exchange.assign(self._finish(client, stop=bool(self._model.stop_training)))
            if self._is_chief:
                shares.state.finalize()

        given["callbacks"] = [_WithOthers(client, exchange, finish), *callbacks]
        ended_by = 0
        try:
            with exchange.using(client):
                history = loops.fit(*arguments.args, **arguments.kwargs)
        except Preempted as ended:
            ended_by = ended.signal
            client.own_signal = ended_by if self._is_chief else 0
            self._finish(client, stop=True)
        finally:
            client.close()
            self._session = self._resume = None
        self._end_if_preempted(ended_by if self._is_chief else client.signal)
        self._end(client.pushed, None, history)
        return history

    def begin(self, exchange: WorkerLink) -> None:
        """Give the servers what the chief has, and all workers what the servers have."""
        client = exchange.reach()
        if self._is_chief:
            if self._resume is not None:
                self._resume.restore_shared()
            weights = [np.asarray(v.numpy()) for v in self._model.trainable_variables]
            client.load(weights, self._shares.state.take())
        exchange.pull()

    def session(self) -> CheckpointSession:
        """The checkpoints of the ``fit`` that has begun on this worker."""
        assert self._session is not None
        return self._session

    def _end_if_preempted(self, number: int) -> None:
        """End all ranks alike after a signal; collective."""
        if number:
            self._collectives.barrier(name="checkpoint is saved")
            raise Preempted(number)

    def _finish(self, client: Client, *, stop: bool) -> list[np.ndarray]:
        """Wait for the others; the last weights, and on the chief the optimizer's last state."""
        if not self._is_chief:
            return client.end()
        states = self._shares.state.room()
        weights = client.end(stop=stop, states=states)
        self._shares.state.put(states)
        return weights

    def _end(self, pushed: int, counts: StalenessStats | None, history: Any) -> None:
        """See that no gradient was lost, and leave all ranks alike; collective.

        Args:
            pushed: How many this rank has sent.
            counts: What became of them on this server; None on a worker.
            history: Of this worker; becomes the chief's on a server.
        """
        rank = self._collectives.member
        told = {"rank": rank, "pushed": pushed, "counts": counts and counts.to_json()}
        everyone = self._collectives.allgather_object(told, name="gradients of parameter servers")
        sent = {entry["rank"]: entry["pushed"] for entry in everyone if entry["counts"] is None}
        served = {e["rank"]: StalenessStats.from_json(e["counts"]) for e in everyone if e["counts"]}
        for server, has in served.items():
            # Of those that died, only the server knows.
            came = {worker: has.pushed[worker] for worker in sent}
            if came != sent or has.taken + has.late != has.pushed.total():
                raise CollectiveError(
                    f"Workers sent {sent} gradients, by rank, and to the parameter server of rank "
                    f"{server} came {dict(has.pushed)}, of which it has {has.taken} and dropped "
                    f"{has.late}; this is an error of hvdtrain."
                )
        broadcast_weights(self._model, self._collectives)
        if self._is_chief:
            logger.info(self._account(next(iter(served.values()))))
        mine = history.history.items()
        logs = {name: [np.asarray(value).tolist() for value in values] for name, values in mine}
        chiefs = {"epoch": getattr(history, "epoch", []), "logs": logs}
        chiefs = self._collectives.broadcast_object(chiefs, name="history")
        if counts is not None:
            history.epoch, history.history = chiefs["epoch"], chiefs["logs"]
        report.phase("after fit")
        self._membership.renew()
        if self._membership.too_few is not None:
            raise self._membership.too_few

    def _meet(self) -> tuple[int, ...]:
        """The workers that are there; collective.

        Raises:
            PeerFailedError: Another rank is lost that can't be done without, or too many are.
        """
        self._membership.renew()
        there, roles = self._membership.members, self._shares.roles
        for rank in (roles.workers[0], *roles.servers):
            if rank not in there:
                raise self._messages.loss_of(rank, "began to train")
        if self._membership.too_few is not None:
            raise self._membership.too_few
        return tuple(worker for worker in roles.workers if worker in there)

    def _update_log(self, shard: Shard) -> AbstractContextManager[UpdateLog | None]:
        folder, rank = self._settings.update_log, self._collectives.member
        if folder is None:
            return nullcontext()
        pieces = [[self._shares.specs[p.variable].path, p.start, p.stop] for p in shard.pieces]
        header = {"server": rank, "workers": self._shares.roles.workers, "pieces": pieces}
        return UpdateLog(Path(folder) / f"server-{rank}.jsonl", header)

    def _consistency(self, workers: Sequence[int]) -> Consistency:
        if self._settings.gathers:
            return Synchronous(workers, max(1, self._settings.gradients_in_update(len(workers))))
        bound = self._settings.staleness_bound
        # Who overlaps makes one more step before it takes the answer that says whether it may.
        return Asynchronous(workers, bound if bound is None else bound - self._settings.overlap)

    def _account(self, first: StalenessStats) -> str:
        workers, sent = len(self._shares.roles.workers), first.pushed.total()
        what = "differences" if self._settings.mode == "easgd" else "gradients"
        late = f", {first.late} of them too late" if first.late else ""
        return (
            f"{workers} workers sent {sent} {what}{late}; staleness {first.mean_staleness:.1f} on "
            f"average, {first.percentile_of_staleness(95)} at the 95th percentile, "
            f"{max(first.staleness, default=0)} at most"
        )

    @property
    def _is_chief(self) -> bool:
        return self._collectives.rank == 0


def _train_alone(given: dict[str, Any]) -> None:
    """Take validation out of the arguments of ``fit``, with the data that belong to it."""
    part = given.pop("validation_split", 0.0)
    if part and given.pop("validation_data", None) is None:
        names = ("x", "y", "sample_weight")
        arrays, _ = split_validation(tuple(given.get(name) for name in names), part)
        given.update(zip(names, arrays))
    given["validation_data"] = None


class _WithOthers(keras.callbacks.Callback):
    """Ends the training when another worker has ended it for all, and waits for the others.

    Before the user's callbacks: they are to see the weights that count, and what they give the
    model as training ends is to stay.

    Args:
        client: Is told so by the servers.
        link: Knows which weights the model should have.
        finish: Takes the last weights.
    """

    def __init__(self, client: Client, link: WorkerLink, finish: Callable[[], None]) -> None:
        super().__init__()
        self._client = client
        self._link = link
        self._finish = finish

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._link.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._link.go_on()

    def on_test_begin(self, logs: Any = None) -> None:
        self._link.show_newest()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._link.show_newest()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._client.stopped:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self._finish()
