"""``fit`` in a job with parameter servers: what all ranks do alike, and what it is on a server."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.collectives.engine import Engine, single_engine
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.config import Settings
from hvdtrain.errors import CollectiveError, Preempted
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.callback_list import list_callbacks
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.model_sync import broadcast_weights
from hvdtrain.keras.saving.checkpoint_callback import find_checkpoint_callback
from hvdtrain.keras.saving.checkpoint_schedule import PreemptionSignals
from hvdtrain.keras.saving.resume import broadcast_arrays, find
from hvdtrain.keras.saving.training_progress import TrainingProgress
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.served.server_shards import ServerShards
from hvdtrain.monitor import report
from hvdtrain.monitor.journal import Journal
from hvdtrain.parameter_server.consistency import Asynchronous, Consistency, Synchronous
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.sharding import Shard
from hvdtrain.parameter_server.updates import ShardUpdates, StalenessStats
from hvdtrain.parameter_server.variable_table import VariableTable

__all__ = ["ServedJob", "find_for_all", "serve"]

logger = logging.getLogger(__package__)


@dataclass(frozen=True, kw_only=True)
class ServedJob:
    """A rank's side of a ``fit`` of workers and servers: what it has, and what all do alike.

    Attributes:
        collectives: Those between all ranks.
        membership: The ranks that are there, of all.
        messages: The way between workers and servers.
        reducer: Reduces within this rank alone, and keeps the errors that TensorFlow hides.
        presharded: Whether each worker passes data of its own.
    """

    model: keras.Model
    collectives: Engine
    membership: Membership
    messages: PointToPoint
    reducer: GradientReducer
    steps: ModelSteps
    settings: Settings
    shards: ServerShards
    presharded: bool

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the chief; it always is a worker."""
        return self.collectives.rank == 0

    def meet(self) -> tuple[int, ...]:
        """Returns the workers that are there; collective.

        Raises:
            PeerFailedError: Another rank is lost that can't be done without, or too many are.
        """
        self.membership.renew()
        there, roles = self.membership.members, self.shards.roles
        for rank in (roles.workers[0], *roles.servers):
            if rank not in there:
                raise self.messages.loss_of(rank, "began to train")
        if self.membership.too_few is not None:
            raise self.membership.too_few
        return tuple(worker for worker in roles.workers if worker in there)

    def end_if_preempted(self, number: int) -> None:
        """End all ranks alike after a signal; collective."""
        if number:
            self.collectives.barrier(name="checkpoint is saved")
            raise Preempted(number)

    def end(self, pushed: int, counts: StalenessStats | None, history: Any) -> None:
        """Check that no gradient was lost, and leave all ranks alike; collective.

        Args:
            pushed: How many this rank has sent.
            counts: What became of those that came to this server; None on a worker.
            history: The callback of this rank's ``fit``; becomes the chief's on a server.
        """
        rank = self.collectives.member
        mine = {"rank": rank, "pushed": pushed, "counts": counts and counts.to_json()}
        everyone = self.collectives.allgather_object(mine, name="gradients of parameter servers")
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
        broadcast_weights(self.model, self.collectives)
        if self.is_chief:
            logger.info(self._account(next(iter(served.values()))))
        entries = history.history.items()
        logs = {name: [np.asarray(value).tolist() for value in values] for name, values in entries}
        chiefs = {"epoch": getattr(history, "epoch", []), "logs": logs}
        chiefs = self.collectives.broadcast_object(chiefs, name="history")
        if counts is not None:
            history.epoch, history.history = chiefs["epoch"], chiefs["logs"]
        report.phase("after fit")
        self.membership.renew()
        if self.membership.too_few is not None:
            raise self.membership.too_few

    def _account(self, first: StalenessStats) -> str:
        workers, sent = len(self.shards.roles.workers), first.pushed.total()
        late = f", {first.late} of them too late" if first.late else ""
        return (
            f"{workers} workers sent {sent} gradients{late}; staleness {first.mean_staleness:.1f} "
            f"on average, {first.percentile_of_staleness(95)} at the 95th percentile, "
            f"{max(first.staleness, default=0)} at most"
        )


def find_for_all(
    store: Store | None, state: TrainingState, collectives: Engine
) -> tuple[TrainingProgress, Snapshot] | None:
    """Look for a checkpoint in the chief's ``store``, and give all of it to all ranks; collective.

    Raises:
        CheckpointError: None can be used; on all ranks.
    """
    found = find(store, state, collectives)
    if found is None:
        return None
    progress, snapshot = found
    model = broadcast_arrays(None if snapshot is None else snapshot.model, collectives)
    ranks = broadcast_arrays(None if snapshot is None else snapshot.ranks, collectives)
    return progress, Snapshot(step=progress.step, state={}, model=model, ranks=ranks)


def serve(job: ServedJob, arguments: inspect.BoundArguments) -> Any:
    """Take the place of ``fit`` on a server: serve until all workers have ended.

    Raises:
        Preempted: A signal came to some rank, and a checkpoint was saved.
    """
    workers = job.meet()
    checkpoint = find_checkpoint_callback(list_callbacks(arguments.arguments.get("callbacks")))
    signals = PreemptionSignals()
    if checkpoint is not None:
        state = TrainingState(job.model, single_engine(), job.steps.samples)
        find_for_all(None, state, job.collectives)
    report.phase("serving")
    shards, settings = job.shards, job.settings
    rank = job.collectives.member
    shard = shards.shards[shards.roles.servers.index(rank)]
    variables = job.model.trainable_variables
    table = VariableTable(shards.state.optimizer, shard, variables)
    with _update_log(job, shard) as log:
        updates = ShardUpdates(table, shards.memory.published[rank], log=log)
        server = Server(
            job.messages,
            updates,
            shards.memory,
            workers=workers,
            consistency=_consistency(job, workers),
            require_finite=settings.non_finite == "error",
            received_signal=lambda: signals.received,
            # Who waits for it would give up otherwise.
            silence_s=min(settings.worker_timeout_s, settings.timeout_s / 2),
            least_workers=settings.min_np - len(shards.roles.servers),
            warn=logger.warning if rank == shards.roles.servers[0] else lambda line: None,
        )
        if checkpoint is not None:
            signals.catch()
        try:
            with job.collectives.abort_on_error():
                server.serve()
        finally:
            signals.release(handled=server.ended_by > 0)
    job.end_if_preempted(server.ended_by)
    history = keras.callbacks.History()
    history.set_model(job.model)
    job.end(0, updates.counts, history)
    return history


def _update_log(job: ServedJob, shard: Shard) -> AbstractContextManager[Journal | None]:
    folder, rank = job.settings.update_log, job.collectives.member
    if folder is None:
        return nullcontext()
    log = Journal(Path(folder) / f"server-{rank}.jsonl", "updates", "--update-log", mode="a")
    pieces = [[job.shards.specs[p.variable].path, p.start, p.stop] for p in shard.pieces]
    # This line tells one fit from the one before.
    header = {"server": rank, "workers": job.shards.roles.workers, "pieces": pieces}
    log.write(json.dumps(header) + "\n")
    return closing(log)


def _consistency(job: ServedJob, workers: Sequence[int]) -> Consistency:
    if job.settings.gathers:
        return Synchronous(workers, max(1, job.settings.gradients_in_update(len(workers))))
    bound = job.settings.staleness_bound
    # Who overlaps makes one more step before it takes the answer that says whether it may.
    return Asynchronous(workers, bound if bound is None else bound - job.settings.overlap)
