"""Checkpoints of ``fit`` with parameter servers, where workers are at different steps."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdtrain.collectives.engine import single_engine
from hvdtrain.data.partition import JointSteps, Position
from hvdtrain.monitor import report
from hvdtrain.parameter_server.protocol import NO_POSITION
from hvdtrain.private_api.keras import iterations_of
from hvdtrain.trainer.epoch_iterator import EpochIterator, EpochPlace
from hvdtrain.trainer.learning_rate import rescale_restored_rate
from hvdtrain.trainer.membership import Membership
from hvdtrain.trainer.optimizer_patch import accumulator_variables, plain_optimizers
from hvdtrain.trainer.saving.callback_states import callback_arrays
from hvdtrain.trainer.saving.checkpoint_callback import Checkpoint, open_store
from hvdtrain.trainer.saving.checkpoint_schedule import LOOK_S
from hvdtrain.trainer.saving.checkpoint_session import CheckpointSession
from hvdtrain.trainer.saving.training_progress import (
    TrainingProgress,
    WorkerPosition,
    restore_saved_callbacks,
)
from hvdtrain.trainer.saving.training_state import TrainingState
from hvdtrain.trainer.served.gradient_exchange import GradientExchange
from hvdtrain.trainer.served.served_fit import ServedJob, find_for_all

__all__ = ["WorkerSession", "remaining_positions"]

_FIRST_POLL_S = 0.01


class WorkerSession(CheckpointSession):
    """Takes and restores the checkpoints of one worker's ``fit``.

    The chief saves each worker's position in the worker's data. It gets these positions from the
    servers. When training resumes, every worker gets the whole checkpoint. All workers must create
    a session while the servers call ``find_for_all``.

    Raises:
        CheckpointError: If no checkpoint can be used. All ranks raise this error.
    """

    def __init__(
        self,
        job: ServedJob,
        exchange: GradientExchange,
        worker: Membership,
        checkpoint: Checkpoint,
        callbacks: Sequence[Any],
    ) -> None:
        state = TrainingState(job.model, single_engine(), job.steps.samples, callbacks)
        store = open_store(checkpoint.options)
        newest = find_for_all(store if job.is_chief else None, state, job.collectives)
        super().__init__(checkpoint.options, state, worker, store, newest)
        self._job = job
        self._exchange = exchange
        self._starts: Sequence[WorkerPosition] = ()  # the starting position of each worker
        self._moved_back = False  # the chief resumes in an earlier epoch than the checkpoint's
        self._ran_before = 0

    @contextmanager
    def running(self, epochs: EpochIterator, seed: int) -> Iterator[None]:
        """Resume this worker from the checkpoint, and handle signals within the ``with`` block."""
        if self._saved is not None:
            self._saved = self._own_progress(self._saved, epochs)
        with super().running(epochs, seed):
            self._ran_before = int(self._job.steps.ran.numpy()) - epochs.step
            self._exchange.position = self._position
            yield

    def _position(self, ran: int, samples: int) -> tuple[int, ...]:
        # One call of the train function may run several steps.
        left = self._epochs.step - (ran - self._ran_before)
        epoch, place = self._epochs.place_within(left)
        return WorkerPosition(epoch, place, samples).to_numbers()

    def restore_shared(self) -> None:
        """Restore the weights and the optimizer from the checkpoint."""
        if self._saved is None or self._snapshot is None:
            return
        self._state.restore_shared(self._snapshot.model)
        in_update = self._job.settings.gradients_in_update
        before, now = in_update(self._saved.place.ranks), in_update(self._membership.size)
        rescale_restored_rate(self._state.model.optimizer, before, now)

    def on_epoch_begin(self, epoch: int) -> None:
        """Restore the worker in the epoch in which it resumes: the first if nothing was saved."""
        super().on_epoch_begin(epoch)
        if not self._starts:
            size = self._membership.size
            place = EpochPlace(position=None, epoch_step=0, epochs=0, passes=0, ranks=size)
            self._starts = [WorkerPosition(epoch, place, 0)] * size

    def on_batch_end(self, batch: int) -> None:
        """Take a checkpoint if one is due and no gradients are accumulated."""
        if self._job.is_chief and self._state.accumulates:
            self._epoch_step = batch + 1
        else:
            super().on_batch_end(batch)

    def finish(self) -> None:
        """If the chief finishes first, take checkpoints until the other workers have finished."""
        saved = self._saved
        if saved is None:
            return
        self._end_resuming(saved)
        if self._job.is_chief and any(start.epoch < saved.epoch for start in self._starts):
            self._epoch = saved.epoch
            self._wait_for_others(stop=False)
            self._take()
            self._export()

    def _own_progress(self, saved: TrainingProgress, epochs: EpochIterator) -> TrainingProgress:
        """Return where this worker resumes, and set where its later passes begin."""
        size, rank = self._membership.size, self._membership.rank
        self._starts, epochs.begins = _starting_positions(saved, epochs, size)
        start = self._starts[rank]
        self._moved_back = start.epoch < saved.epoch and rank == 0
        epoch_numbers, logs = saved.history["epoch"], saved.history["logs"]
        count = sum(number < start.epoch for number in epoch_numbers)
        history = {
            "epoch": epoch_numbers[:count],
            "logs": {name: values[:count] for name, values in logs.items()},
        }
        return dataclasses.replace(saved, epoch=start.epoch, place=start.place, history=history)

    def _restore(self, saved: TrainingProgress) -> None:
        model, snapshot = self._state.model, self._snapshot
        assert snapshot is not None
        rank, size = self._membership.rank, self._membership.size
        self.restore_shared()
        restore_saved_callbacks(saved, callback_arrays(snapshot.model), self._state, self._warn)
        self._state.restore_part(snapshot.ranks, saved.place.ranks, rank=rank, size=size)
        if rank:
            _reset_accumulation(model.optimizer)
        if self._moved_back:
            model.reset_metrics()
        # Other workers may have trained since.
        self._exchange.pull()

    def _stopped_early(self, epochs: int) -> bool:
        # Only the chief runs EarlyStopping, and other workers may have epochs left.
        return False

    def _signal(self) -> int:
        own = super()._signal()
        client = self._exchange.client
        if not self._job.is_chief:
            # The signal is sent with the next gradient. The chief decides how to react.
            client.own_signal = own
            return client.signal
        # Servers don't reply any more once all workers are done.
        if client.training and time.monotonic() - client.last_reply_s > LOOK_S:
            client.update_status()
        return own or client.signal

    def _save(self, save: Callable[[], object]) -> None:
        # Send requests while saving, because servers time out if no worker sends one.
        client = self._exchange.client
        with ThreadPoolExecutor(1, "hvdtrain save") as thread:
            saved = thread.submit(save)
            while not wait([saved], LOOK_S).done:
                if client.training:
                    client.update_status()
            saved.result()

    def _others(self) -> Sequence[WorkerPosition]:
        size, states = self._membership.size, self._job.pack_state()
        weights, positions = self._exchange.client.snapshot(size, states)
        self._exchange.assign(weights)
        self._job.load_state(states)
        return [self._unpack_position(rank, positions[rank]) for rank in range(1, size)]

    def _unpack_position(self, rank: int, numbers: tuple[int, ...]) -> WorkerPosition:
        start = self._starts[rank]
        if numbers == NO_POSITION:
            return start
        begins = dict(self._epochs.begins)
        if start.place.position is not None:
            begins[start.place.position.epoch] = start.place.position
        return WorkerPosition.from_numbers(numbers, ranks=self._membership.size, begins=begins)

    def _wait_for_others(self, *, stop: bool) -> None:
        client = self._exchange.client
        client.leave(stop=stop)
        pause_s = _FIRST_POLL_S
        with report.during("waiting for other workers"):
            while client.training:
                self._take_if_asked()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_S)
                client.update_status()


def _starting_positions(
    saved: TrainingProgress, epochs: EpochIterator, size: int
) -> tuple[Sequence[WorkerPosition], dict[int, Position]]:
    """Return the positions of workers when training resumes, and where later passes begin.

    The first result has a position for each of ``size`` workers. The second result maps an epoch to
    the position where its pass over the data begins, if that is not the start of the data.
    """
    data, place = epochs.sharded, saved.place
    begins = {position.epoch: position for position in saved.begins}
    before = [WorkerPosition(saved.epoch, place, 0), *saved.others]
    if not saved.others:
        return before * size, begins
    as_before = len(before) == size and saved.each == data.each
    if as_before or data.presharded:
        return before if len(before) == size else before[:1] * size, begins
    positions = [
        worker.place.position or begins.get(worker.epoch, Position(epoch=worker.epoch))
        for worker in before
    ]
    first, *later = remaining_positions(positions, each=saved.each, units=data.units, begins=begins)
    slowest = min(before, key=lambda worker: (worker.epoch, worker.place.epoch_step))
    most = epochs.steps_per_epoch or max(worker.place.epoch_step for worker in before)
    done = sum(s.place.epoch_step if s.epoch == slowest.epoch else most for s in before)
    started = first.start > 0 and done > 0
    joint = dataclasses.replace(
        slowest.place,
        position=first if first.start else None,
        epoch_step=max(1, done // len(before)) if started else 0,
    )
    starts = [WorkerPosition(slowest.epoch, joint, 0)] * size
    return starts, {**begins, **{position.epoch: position for position in later}}


def remaining_positions(
    positions: Sequence[Position],
    *,
    each: int,
    units: int | None,
    begins: Mapping[int, Position],
) -> list[Position]:
    """Return what is left of each pass over the data, if ranks are at different positions.

    The result has one position for each pass, from the slowest rank's pass to the fastest rank's
    pass. From these positions, any number of ranks can train on exactly the data that is left.

    Args:
        positions: The position of each rank. The rank has taken its share of each step before that
            position.
        each: Number of units that a rank takes in a full step. A unit is a sample or a batch.
        units: Number of units in a pass. None if unknown or endless. If it is unknown and a rank
            has finished a pass, units that only this rank has reached are repeated.
        begins: Maps an epoch to the position where its pass begins, if that is not the start of the
            data.
    """
    size = len(positions)
    remaining = []
    epochs = [position.epoch for position in positions]
    for epoch in range(min(epochs), max(epochs) + 1):
        within = [position for position in positions if position.epoch == epoch]
        begin = begins.get(epoch, Position(epoch=epoch))
        start = max((position.start for position in within), default=begin.start)
        if units is not None and max(epochs) > epoch:
            start = units
        missed: set[int] = set()
        for rank, position in enumerate(positions):
            if position.epoch <= epoch:
                current = position if position.epoch == epoch else begin
                left = None if units is None else current.left_of(units)
                joint = JointSteps(units=left, each=each, size=size)
                missed.update(_places_below(start, current, joint, rank))
        joint_batch = next((p.joint_batch for p in within if p.joint_batch), begin.joint_batch)
        remaining.append(
            Position(
                epoch=epoch,
                start=start,
                missed=tuple(sorted(missed)),
                joint_batch=joint_batch or each * size,
            )
        )
    return remaining


def _places_below(start: int, position: Position, joint: JointSteps, rank: int) -> Iterator[int]:
    """Yield the places below ``start`` whose units ``rank`` has not taken yet.

    ``position`` is the rank's position, and ``joint`` divides the units from there among the ranks.
    """
    for step in itertools.count() if joint.steps is None else range(joint.steps):
        places = position.places(joint.share(step, rank))
        yield from (place for place in places if place < start)
        # Places are in ascending order.
        if places and places[-1] >= start:
            return


def _reset_accumulation(optimizer: Any) -> None:
    """Discard accumulated gradients. Only the chief restores its accumulated gradients."""
    for leaf in plain_optimizers(optimizer):
        for variable in accumulator_variables(leaf):
            variable.assign(np.zeros(variable.shape))
        iterations = iterations_of(leaf)
        waiting = int(iterations.numpy()) % (leaf.gradient_accumulation_steps or 1)
        iterations.assign_sub(waiting)
