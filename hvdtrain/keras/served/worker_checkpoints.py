"""Checkpoints of a ``fit`` in which each worker goes its own way, and servers hold the weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.checkpoint import Snapshot
from hvdtrain.collectives.single import single_collectives
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.leftovers import leftovers
from hvdtrain.keras.epoch_iterator import EpochIterator, EpochPlace
from hvdtrain.keras.learning_rate import follow_saved
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.optimizer_patch import accumulators, plain_optimizers
from hvdtrain.keras.saving.callback_states import kept_by_callbacks
from hvdtrain.keras.saving.checkpoint_callback import Checkpoint
from hvdtrain.keras.saving.checkpoint_saver import CheckpointSaver, open_store
from hvdtrain.keras.saving.checkpoint_schedule import LOOK_S
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession
from hvdtrain.keras.saving.peers import Peers
from hvdtrain.keras.saving.resume import Resume
from hvdtrain.keras.saving.training_progress import TrainingProgress
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.saving.worker_position import WorkerPosition
from hvdtrain.keras.served.served_fit import ServedJob, find_for_all
from hvdtrain.keras.served.worker_exchange import WorkerExchange
from hvdtrain.monitor import report
from hvdtrain.parameter_server.protocol import NO_POSITION

__all__ = ["WorkerResume", "begin_worker_session"]

_SHORTEST_PAUSE_S = 0.01


def begin_worker_session(
    job: ServedJob,
    checkpoint: Checkpoint,
    callbacks: Sequence[Any],
    exchange: WorkerExchange,
    worker: Membership,
) -> tuple[CheckpointSession, WorkerResume | None]:
    """Set up what takes checkpoints on a worker; collective, with ``find_for_all`` on servers.

    Returns:
        The session, and what training goes on from, or None.

    Raises:
        CheckpointError: No checkpoint can be used; on all ranks.
    """
    state = TrainingState(job.model, single_collectives(), job.steps.samples, callbacks)
    store = open_store(checkpoint.options)
    found = find_for_all(store if job.is_chief else None, state, job.collectives)
    resume = found and WorkerResume(*found, state, job, exchange, worker)
    peers = WorkerPeers(job, exchange, state, worker, resume)
    saver = CheckpointSaver(
        checkpoint.options, state, worker, peers, store, presharded=job.presharded
    )
    return CheckpointSession(saver, resume), resume


@dataclasses.dataclass(eq=False)
class WorkerPeers(Peers):
    """The servers and the other workers, as one worker's ``CheckpointSession`` deals with them."""

    job: ServedJob
    exchange: WorkerExchange
    state: TrainingState
    worker: Membership
    resume: WorkerResume | None

    def __post_init__(self) -> None:
        self._starts: Sequence[WorkerPosition] = ()
        self._epochs: EpochIterator | None = None
        self._ran_before = 0

    def open(self, epochs: EpochIterator) -> None:
        self._epochs = epochs
        self._ran_before = int(self.job.steps.ran.numpy()) - epochs.step
        if self.resume is not None:
            self._starts = self.resume.starts
        self.exchange.position = self._position

    def _position(self, ran: int, samples: int) -> tuple[int, ...]:
        assert self._epochs is not None
        # Several steps may run in one go.
        left = self._epochs.step - (ran - self._ran_before)
        epoch, place = self._epochs.place_within(left)
        return WorkerPosition(epoch, place, samples).to_numbers()

    def received(self, own: int) -> int:
        client = self.exchange.reach()
        if not self.job.is_chief:
            # Told with the next gradient; what counts is what the chief makes of it.
            client.own_signal = own
            return client.signal
        # Once all have ended, no server is there to be asked.
        if client.training and time.monotonic() - client.heard_s > LOOK_S:
            client.look()
        return own or client.signal

    @property
    def ready(self) -> bool:
        # Between two updates the chief has gradients that no server has.
        return not (self.job.is_chief and self.state.accumulates)

    def begin_epoch(self, epoch: int) -> None:
        if not self._starts:
            place = EpochPlace(
                position=None, epoch_step=0, epochs=0, passes=0, ranks=self.worker.size
            )
            self._starts = [WorkerPosition(epoch, place, 0)] * self.worker.size

    def collect(self) -> Sequence[WorkerPosition]:
        # Gradients of the chief that wait to be sent belong to what it has done.
        self.exchange.send_rest()
        states = self.job.shards.state.buffers()
        weights, numbers = self.exchange.reach().snapshot(self.worker.size, states)
        self.exchange.show(weights)
        self.job.shards.state.put(states)
        return [self._position_of(rank, numbers[rank]) for rank in range(1, self.worker.size)]

    def _position_of(self, rank: int, numbers: tuple[int, ...]) -> WorkerPosition:
        assert self._epochs is not None
        first = self._starts[rank]
        if numbers == NO_POSITION:
            return first
        begins = dict(self._epochs.begins)
        if first.place.position is not None:
            begins[first.place.position.epoch] = first.place.position
        return WorkerPosition.from_numbers(numbers, ranks=self.worker.size, begins=begins)

    def were_behind(self, epoch: int) -> bool:
        return any(start.epoch < epoch for start in self._starts)

    def until_all_have_ended(self, *, stop: bool) -> Iterator[None]:
        client = self.exchange.reach()
        client.leave(stop=stop and self.job.is_chief)
        pause_s = _SHORTEST_PAUSE_S
        with report.during("waiting for other workers"):
            while client.training:
                yield
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_S)
                client.look()


class WorkerResume(Resume):
    """A checkpoint on its way into one worker, which has all of it."""

    def __init__(
        self,
        progress: TrainingProgress,
        snapshot: Snapshot,
        state: TrainingState,
        job: ServedJob,
        exchange: WorkerExchange,
        worker: Membership,
    ) -> None:
        super().__init__(progress, snapshot, state)
        self._saved = snapshot
        self._in_update = job.settings.gradients_in_update
        self._exchange = exchange
        self._rank = worker.rank
        self._size = worker.size
        self._went_back = False
        self.starts: Sequence[WorkerPosition] = ()
        """The position at which each worker begins; known once the data are."""

    def move(self, epochs: EpochIterator) -> None:
        progress = self.progress
        begins = {position.epoch: position for position in progress.begins}
        self.starts, epochs.begins = _begin_at(progress, begins, epochs, self._size)
        mine = self.starts[self._rank]
        self._went_back = mine.epoch < progress.epoch and self._rank == 0
        self.progress = dataclasses.replace(
            progress,
            epoch=mine.epoch,
            place=mine.place,
            history=_history_before(progress.history, mine.epoch),
        )
        super().move(epochs)

    def restore_shared(self) -> None:
        """Give this worker's model the weights and the optimizer's state."""
        self._state.restore_shared(self._saved.model)
        before, now = (self._in_update(n) for n in (self.progress.place.ranks, self._size))
        follow_saved(self._state.model.optimizer, before, now)

    def restore(self) -> None:
        model = self._state.model
        self.restore_shared()
        self.restore_callbacks(kept_by_callbacks(self._saved.model))
        ranks = self.progress.place.ranks
        self._state.restore_part(self._saved.ranks, ranks, rank=self._rank, size=self._size)
        if self._rank:
            _forget_accumulated(model.optimizer)
        if self._went_back:
            model.reset_metrics()
        # Peers may have trained on meanwhile.
        self._exchange.pull()

    def _say(self, text: str) -> None:
        if self._rank == 0:
            super()._say(text)


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
        for variable in accumulators(leaf):
            variable.assign(np.zeros(variable.shape))
        waiting = int(leaf._iterations.numpy()) % (leaf.gradient_accumulation_steps or 1)
        leaf._iterations.assign_sub(waiting)
