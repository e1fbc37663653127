"""The parts of ``fit`` with parameter servers that all ranks share, or that only servers run."""

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
from hvdtrain.cluster.roles import Roles
from hvdtrain.collectives.engine import Engine, single_engine
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.config import Settings
from hvdtrain.errors import CollectiveError, Preempted
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.monitor import report
from hvdtrain.monitor.journal import Journal
from hvdtrain.parameter_server.consistency import Asynchronous, Consistency, Synchronous
from hvdtrain.parameter_server.published_weights import SharedMemory
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.shard_optimizer import pack_states, plain_optimizer, unpack_states
from hvdtrain.parameter_server.sharding import Shard, Spec
from hvdtrain.parameter_server.updates import ShardUpdates, StalenessStats
from hvdtrain.parameter_server.variable_table import VariableTable
from hvdtrain.private_api.keras import moving_averages, own_trainable_variables
from hvdtrain.trainer.backends.tensorflow.model_steps import ModelSteps
from hvdtrain.trainer.callback_list import list_callbacks
from hvdtrain.trainer.membership import Membership
from hvdtrain.trainer.model_sync import broadcast_weights
from hvdtrain.trainer.saving.checkpoint_callback import find_checkpoint_callback
from hvdtrain.trainer.saving.checkpoint_schedule import PreemptionSignals
from hvdtrain.trainer.saving.training_progress import (
    TrainingProgress,
    broadcast_arrays,
    find_checkpoint,
)
from hvdtrain.trainer.saving.training_state import TrainingState

__all__ = ["ServedJob", "find_for_all", "serve"]

logger = logging.getLogger(__package__)


@dataclass(frozen=True, kw_only=True)
class ServedJob:
    """One rank's view of a model in a job with workers and parameter servers."""

    model: keras.Model
    collectives: Engine  # communication between all ranks
    membership: Membership
    messages: PointToPoint  # communication between workers and servers
    # Reduces tensors within this rank only. If TensorFlow replaces an error of hvdtrain by a
    # different error, the reducer stores the first error.
    reducer: GradientReducer
    steps: ModelSteps
    settings: Settings
    roles: Roles
    specs: Sequence[Spec]  # the specs of all trainable variables
    shards: Sequence[Shard]  # the shard of each server
    memory: SharedMemory  # memory shared with other ranks on this host

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the chief, which is always a worker."""
        return self.collectives.rank == 0

    def remaining_workers(self) -> tuple[int, ...]:
        """Return the workers that were not lost. All ranks must call this.

        Raises:
            PeerFailedError: If the chief or a server was lost, or if too few ranks are left.
        """
        self.membership.renew()
        members = self.membership.members
        for rank in (self.roles.workers[0], *self.roles.servers):
            if rank not in members:
                raise self.messages.peer_lost_error(rank, "began to train")
        if self.membership.too_few is not None:
            raise self.membership.too_few
        return tuple(worker for worker in self.roles.workers if worker in members)

    @property
    def has_averages(self) -> bool:
        """Whether the servers keep moving averages of the weights (``use_ema``)."""
        return bool(plain_optimizer(self.model.optimizer).use_ema)

    def pack_state(self, *, averages_only: bool = False) -> list[np.ndarray]:
        """Return the optimizer state in new flat buffers for servers, which can also receive it."""
        return pack_states(self.model.optimizer, self.shards, averages_only=averages_only)

    def load_state(self, states: Sequence[np.ndarray], *, averages_only: bool = False) -> None:
        """Assign the servers' state to the model's optimizer."""
        unpack_states(self.model.optimizer, self.shards, states, averages_only=averages_only)

    def assign_averages(self) -> None:
        """Set the weights to their moving averages, like Keras after ``fit`` with ``use_ema``."""
        if self.has_averages:
            plain = plain_optimizer(self.model.optimizer)
            for average, variable in zip(moving_averages(plain), own_trainable_variables(plain)):
                if average is not None:
                    variable.assign(average)

    def end_if_preempted(self, number: int) -> None:
        """Raise ``Preempted`` on all ranks if ``number`` is a signal. All ranks must call this."""
        if number:
            self.collectives.barrier(name="checkpoint is saved")
            raise Preempted(number)

    def end(self, pushed: int, stats: StalenessStats | None, history: Any) -> None:
        """Check that no gradient was lost, and give all ranks the same weights.

        All ranks must call this at the end of ``fit``.

        ``stats`` is None on a worker. On a server, ``history`` receives the chief's history.
        """
        rank = self.collectives.member
        entry = {"rank": rank, "pushed": pushed, "counts": stats and stats.to_json()}
        entries = self.collectives.allgather_object(entry, name="gradients of parameter servers")
        sent = {entry["rank"]: entry["pushed"] for entry in entries if entry["counts"] is None}
        served = {e["rank"]: StalenessStats.from_json(e["counts"]) for e in entries if e["counts"]}
        for server, counts in served.items():
            # Only the remaining workers can report how many gradients they sent.
            received = {worker: counts.pushed[worker] for worker in sent}
            if received != sent or counts.taken + counts.late != counts.pushed.total():
                raise CollectiveError(
                    f"The parameter server of rank {server} received {dict(counts.pushed)} "
                    f"gradients by rank, expected {sent}; it applied {counts.taken} and dropped "
                    f"{counts.late}. This is a bug in hvdtrain."
                )
        broadcast_weights(self.model, self.collectives)
        if self.is_chief:
            logger.info(self._summary(next(iter(served.values()))))
        items = history.history.items()
        logs = {name: [np.asarray(value).tolist() for value in values] for name, values in items}
        of_chief = {"epoch": getattr(history, "epoch", []), "logs": logs}
        of_chief = self.collectives.broadcast_object(of_chief, name="history")
        if stats is not None:
            history.epoch, history.history = of_chief["epoch"], of_chief["logs"]
        report.phase("after fit")
        self.membership.renew()
        if self.membership.too_few is not None:
            raise self.membership.too_few

    def _summary(self, stats: StalenessStats) -> str:
        workers, sent = len(self.roles.workers), stats.pushed.total()
        late = f", {stats.late} of them too late" if stats.late else ""
        counts = stats.staleness or {0: 1}
        staleness = np.repeat([*counts], [*counts.values()])
        percentile = np.percentile(staleness, 95, method="inverted_cdf")
        return (
            f"{workers} workers sent {sent} gradients{late}; staleness {staleness.mean():.1f} on "
            f"average, {percentile} at the 95th percentile, {staleness.max()} at most"
        )


def find_for_all(
    store: Store | None, state: TrainingState, collectives: Engine
) -> tuple[TrainingProgress, Snapshot] | None:
    """Return the newest checkpoint of the chief's ``store``. All ranks must call this.

    Raises:
        CheckpointError: If no checkpoint can be used. All ranks raise this error.
    """
    newest = find_checkpoint(store, state, collectives)
    if newest is None:
        return None
    progress, snapshot = newest
    model = broadcast_arrays(None if snapshot is None else snapshot.model, collectives)
    ranks = broadcast_arrays(None if snapshot is None else snapshot.ranks, collectives)
    return progress, Snapshot(step=progress.step, state={}, model=model, ranks=ranks)


def serve(job: ServedJob, arguments: inspect.BoundArguments) -> Any:
    """Serve workers until all of them are done. A server calls this instead of ``fit``.

    Raises:
        Preempted: If a rank received a signal. A checkpoint has been saved.
    """
    workers = job.remaining_workers()
    checkpoint = find_checkpoint_callback(list_callbacks(arguments.arguments.get("callbacks")))
    signals = PreemptionSignals()
    if checkpoint is not None:
        state = TrainingState(job.model, single_engine(), job.steps.samples)
        find_for_all(None, state, job.collectives)
    report.phase("serving")
    settings, rank, servers = job.settings, job.collectives.member, job.roles.servers
    shard = job.shards[servers.index(rank)]
    table = VariableTable(job.model.optimizer, shard, job.model.trainable_variables)
    with _update_log(job, shard) as log:
        updates = ShardUpdates(table, job.memory.published[rank], log=log)
        server = Server(
            job.messages,
            updates,
            job.memory,
            workers=workers,
            consistency=_consistency(settings, workers),
            require_finite=settings.non_finite == "error",
            received_signal=lambda: signals.received,
            # A worker must become silent before the workers that wait for it time out.
            silence_s=min(settings.worker_timeout_s, settings.timeout_s / 2),
            least_workers=settings.min_np - len(servers),
            warn=logger.warning if rank == servers[0] else lambda line: None,
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
    pieces = [[job.specs[p.variable].path, p.start, p.stop] for p in shard.pieces]
    # Each fit begins with this line.
    header = {"server": rank, "workers": job.roles.workers, "pieces": pieces}
    log.write(json.dumps(header) + "\n")
    return closing(log)


def _consistency(settings: Settings, workers: Sequence[int]) -> Consistency:
    if settings.gathers:
        return Synchronous(workers, max(1, settings.gradients_in_update(len(workers))))
    bound = settings.staleness_bound
    # With overlap a worker makes one more step before it waits for the reply.
    return Asynchronous(workers, bound if bound is None else bound - settings.overlap)
