"""Checkpoints of a ``fit`` in which each worker goes its own way, and servers hold the weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot, Store
from hvdtrain.collectives.engine import single_engine
from hvdtrain.keras.data.leftovers import leftovers
from hvdtrain.keras.data.partition import Position
from hvdtrain.keras.epoch_iterator import EpochIterator, EpochPlace
from hvdtrain.keras.learning_rate import rescale_restored_rate
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.optimizer_patch import accumulator_variables, plain_optimizers
from hvdtrain.keras.saving.callback_states import kept_by_callbacks
from hvdtrain.keras.saving.checkpoint_callback import Checkpoint, open_store
from hvdtrain.keras.saving.checkpoint_schedule import LOOK_S, CheckpointOptions
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession
from hvdtrain.keras.saving.resume import restore_kept
from hvdtrain.keras.saving.training_progress import TrainingProgress, WorkerPosition
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.served.gradient_exchange import GradientExchange
from hvdtrain.keras.served.served_fit import ServedJob, find_for_all
from hvdtrain.monitor import report
from hvdtrain.parameter_server.protocol import NO_POSITION
from hvdtrain.private_api.keras import iterations_of

__all__ = ["WorkerSession", "begin_worker_session"]

_SHORTEST_PAUSE_S = 0.01


def begin_worker_session(
    job: ServedJob,
    checkpoint: Checkpoint,
    callbacks: Sequence[Any],
    exchange: GradientExchange,
    worker: Membership,
) -> WorkerSession:
    """Set up what takes checkpoints on a worker; collective, with ``find_for_all`` on servers.

    Raises:
        CheckpointError: No checkpoint can be used; on all ranks.
    """
    state = TrainingState(job.model, single_engine(), job.steps.samples, callbacks)
    store = open_store(checkpoint.options)
    found = find_for_all(store if job.is_chief else None, state, job.collectives)
    return WorkerSession(checkpoint.options, state, worker, store, found, job, exchange)


class WorkerSession(CheckpointSession):
    """The checkpoints of one worker's ``fit``, who asks the servers what it has to know of others.

    Each worker has all of the checkpoint that training goes on from.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        state: TrainingState,
        worker: Membership,
        store: Store,
        found: tuple[TrainingProgress, Snapshot] | None,
        job: ServedJob,
        exchange: GradientExchange,
    ) -> None:
        super().__init__(options, state, worker, store, found)
        self._job = job
        self._exchange = exchange
        # Where each worker begins; known once the data are.
        self._starts: Sequence[WorkerPosition] = ()
        self._went_back = False
        self._ran_before = 0

    @contextmanager
    def running(self, epochs: EpochIterator, seed: int) -> Iterator[None]:
        if self._saved is not None:
            self._saved = self._own_part(self._saved, epochs)
        with super().running(epochs, seed):
            self._ran_before = int(self._job.steps.ran.numpy()) - epochs.step
            self._exchange.position = self._position
            yield

    def _position(self, ran: int, samples: int) -> tuple[int, ...]:
        # Several steps may run in one go.
        left = self._epochs.step - (ran - self._ran_before)
        epoch, place = self._epochs.place_within(left)
        return WorkerPosition(epoch, place, samples).to_numbers()

    def restore_shared(self) -> None:
        """Give this worker's model the weights and the optimizer that training goes on from."""
        if self._saved is None or self._snapshot is None:
            return
        self._state.restore_shared(self._snapshot.model)
        in_update = self._job.settings.gradients_in_update
        before, now = in_update(self._saved.place.ranks), in_update(self._membership.size)
        rescale_restored_rate(self._state.model.optimizer, before, now)

    def on_epoch_begin(self, epoch: int) -> None:
        super().on_epoch_begin(epoch)
        if not self._starts:
            size = self._membership.size
            place = EpochPlace(position=None, epoch_step=0, epochs=0, passes=0, ranks=size)
            self._starts = [WorkerPosition(epoch, place, 0)] * size

    def on_batch_end(self, batch: int) -> None:
        if self._job.is_chief and self._state.accumulates:
            # Between two updates the chief has gradients that no server has.
            self._epoch_step = batch + 1
        else:
            super().on_batch_end(batch)

    def finish(self) -> None:
        """Call before the others end: where this rank had no epoch to run, some may have."""
        saved = self._saved
        if saved is None:
            return
        self._end_resuming(saved)
        if self._job.is_chief and any(start.epoch < saved.epoch for start in self._starts):
            self._epoch = saved.epoch
            self._wait_for_others(stop=False)
            self._take()
            self._export()

    def _own_part(self, saved: TrainingProgress, epochs: EpochIterator) -> TrainingProgress:
        """Return what this worker goes on from; ``epochs`` learns where later passes begin."""
        begins = {position.epoch: position for position in saved.begins}
        size, rank = self._membership.size, self._membership.rank
        self._starts, epochs.begins = _begin_at(saved, begins, epochs, size)
        mine = self._starts[rank]
        self._went_back = mine.epoch < saved.epoch and rank == 0
        history = _history_before(saved.history, mine.epoch)
        return dataclasses.replace(saved, epoch=mine.epoch, place=mine.place, history=history)

    def _restore(self, saved: TrainingProgress) -> None:
        model, snapshot = self._state.model, self._snapshot
        assert snapshot is not None
        rank, size = self._membership.rank, self._membership.size
        self.restore_shared()
        restore_kept(saved, kept_by_callbacks(snapshot.model), self._state, self._warn)
        self._state.restore_part(snapshot.ranks, saved.place.ranks, rank=rank, size=size)
        if rank:
            _forget_accumulated(model.optimizer)
        if self._went_back:
            model.reset_metrics()
        # Others may have trained on meanwhile.
        self._exchange.pull()

    def _stopped_early(self, epochs: int) -> bool:
        # The chief alone has EarlyStopping, and the others may have epochs left.
        return False

    def _signal(self) -> int:
        own = super()._signal()
        client = self._exchange.reach()
        if not self._job.is_chief:
            # Told with the next gradient; what counts is what the chief makes of it.
            client.own_signal = own
            return client.signal
        # Once all have ended, no server is there to be asked.
        if client.training and time.monotonic() - client.last_reply_s > LOOK_S:
            client.update_status()
        return own or client.signal

    def _save(self, save: Callable[[], object]) -> None:
        # Servers give up when no worker sends anything for the time-out.
        client = self._exchange.reach()
        with ThreadPoolExecutor(1, "hvdtrain save") as thread:
            saved = thread.submit(save)
            while not wait([saved], LOOK_S).done:
                if client.training:
                    client.update_status()
            saved.result()

    def _others(self) -> Sequence[WorkerPosition]:
        size, server_state = self._membership.size, self._job.shards.state
        states = server_state.buffers()
        weights, numbers = self._exchange.reach().snapshot(size, states)
        self._exchange.assign(weights)
        server_state.put(states)
        return [self._position_of(rank, numbers[rank]) for rank in range(1, size)]

    def _position_of(self, rank: int, numbers: tuple[int, ...]) -> WorkerPosition:
        first = self._starts[rank]
        if numbers == NO_POSITION:
            return first
        begins = dict(self._epochs.begins)
        if first.place.position is not None:
            begins[first.place.position.epoch] = first.place.position
        return WorkerPosition.from_numbers(numbers, ranks=self._membership.size, begins=begins)

    def _wait_for_others(self, *, stop: bool) -> None:
        client = self._exchange.reach()
        client.leave(stop=stop)
        pause_s = _SHORTEST_PAUSE_S
        with report.during("waiting for other workers"):
            while client.training:
                self._take_if_asked()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_S)
                client.update_status()


def _begin_at(
    progress: TrainingProgress, begins: Mapping[int, Position], epochs: EpochIterator, size: int
) -> tuple[Sequence[WorkerPosition], dict[int, Position]]:
    """Returns where ``size`` workers begin, and where later passes do."""
    data = epochs.sharded
    place = progress.place
    before = [WorkerPosition(progress.epoch, place, 0), *progress.others]
    if not progress.others:
        return before * size, dict(begins)
    as_before = len(before) == size and progress.each == data.each
    if as_before or data.presharded:
        return before if len(before) == size else before[:1] * size, dict(begins)
    positions = [
        worker.place.position or begins.get(worker.epoch, Position(epoch=worker.epoch))
        for worker in before
    ]
    first, *later = leftovers(positions, each=progress.each, units=data.units, begins=begins)
    slowest = min(before, key=lambda worker: (worker.epoch, worker.place.epoch_step))
    most = epochs.steps_per_epoch or max(worker.place.epoch_step for worker in before)
    done = sum(s.place.epoch_step if s.epoch == slowest.epoch else most for s in before)
    begun = first.start > 0 and done > 0
    joint = dataclasses.replace(
        slowest.place,
        position=first if first.start else None,
        epoch_step=max(1, done // len(before)) if begun else 0,
    )
    starts = [WorkerPosition(slowest.epoch, joint, 0)] * size
    return starts, {**begins, **{position.epoch: position for position in later}}


def _history_before(history: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    count = sum(number < epoch for number in history["epoch"])
    logs = {name: values[:count] for name, values in history["logs"].items()}
    return {"epoch": history["epoch"][:count], "logs": logs}


def _forget_accumulated(optimizer: Any) -> None:
    """Begin between two updates: the others' last gradients are computed again."""
    for leaf in plain_optimizers(optimizer):
        for variable in accumulator_variables(leaf):
            variable.assign(np.zeros(variable.shape))
        iterations = iterations_of(leaf)
        waiting = int(iterations.numpy()) % (leaf.gradient_accumulation_steps or 1)
        iterations.assign_sub(waiting)
