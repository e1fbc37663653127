"""Checkpoints of a ``fit`` in which each worker goes its own way, and servers hold the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.collectives.single import single_collectives
from hvdtrain.keras.epoch_iterator import EpochIterator, EpochPlace
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.saving.checkpoint_callback import Checkpoint
from hvdtrain.keras.saving.checkpoint_saver import CheckpointSaver, open_store
from hvdtrain.keras.saving.checkpoint_schedule import LOOK_S
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession
from hvdtrain.keras.saving.peers import Peers
from hvdtrain.keras.saving.training_state import TrainingState
from hvdtrain.keras.saving.worker_position import WorkerPosition
from hvdtrain.keras.served.served_fit import ServedJob
from hvdtrain.keras.served.server_shards import ServerOptimizerState
from hvdtrain.keras.served.worker_exchange import WorkerExchange
from hvdtrain.keras.served.worker_resume import WorkerResume, find_for_all
from hvdtrain.monitor import report
from hvdtrain.parameter_server.protocol import NO_POSITION

__all__ = ["begin_worker_session"]

_SHORTEST_PAUSE_S = 0.01


def begin_worker_session(
    job: ServedJob,
    checkpoint: Checkpoint,
    callbacks: Sequence[Any],
    exchange: WorkerExchange,
    *,
    worker: Membership,
    presharded: bool,
) -> tuple[CheckpointSession, WorkerResume | None]:
    """Set up what takes checkpoints on a worker; collective, with ``find_for_all`` on servers.

    Args:
        job: What this rank has.
        checkpoint: The user's callback.
        callbacks: All callbacks of this worker.
        exchange: What this worker exchanges with the servers.
        worker: This worker among all.
        presharded: Whether each worker has data of its own.

    Returns:
        The session, and what training goes on from, or None.

    Raises:
        CheckpointError: No checkpoint can be used; on all ranks.
    """
    state = TrainingState(job.model, single_collectives(), job.steps.samples, callbacks)
    store = open_store(checkpoint.options)
    found = find_for_all(store if worker.rank == 0 else None, state, job.collectives)
    resume = None
    if found is not None:
        resume = WorkerResume(
            *found,
            state,
            rank=worker.rank,
            size=worker.size,
            in_update=job.settings.gradients_in_update,
            pull=exchange.pull,
        )
    peers = WorkerPeers(
        exchange,
        job.steps,
        state,
        job.shards.state,
        rank=worker.rank,
        size=worker.size,
        resume=resume,
    )
    saver = CheckpointSaver(checkpoint.options, state, worker, peers, store, presharded=presharded)
    return CheckpointSession(saver, resume), resume


class WorkerPeers(Peers):
    """The servers and the other workers, as one worker's ``CheckpointSession`` deals with them.

    Args:
        exchange: What this worker exchanges with the servers.
        steps: What the model runs on each batch.
        state: What belongs to the training, beside the model.
        servers: What their optimizers know.
        rank: The number of this worker.
        size: How many workers there are.
        resume: What training goes on from, or None.
    """

    def __init__(
        self,
        exchange: WorkerExchange,
        steps: ModelSteps,
        state: TrainingState,
        servers: ServerOptimizerState,
        *,
        rank: int,
        size: int,
        resume: WorkerResume | None,
    ) -> None:
        self._exchange = exchange
        self._steps = steps
        self._state = state
        self._servers = servers
        self._is_chief = rank == 0
        self._size = size
        self._resume = resume
        self._starts: Sequence[WorkerPosition] = ()
        self._epochs: EpochIterator | None = None
        self._ran_before = 0

    def open(self, epochs: EpochIterator) -> None:
        self._epochs = epochs
        self._ran_before = int(self._steps.ran.numpy()) - epochs.step
        if self._resume is not None:
            self._starts = self._resume.starts
        self._exchange.position = self._position

    def _position(self, ran: int, samples: int) -> tuple[int, ...]:
        assert self._epochs is not None
        # Several steps may run in one go.
        left = self._epochs.step - (ran - self._ran_before)
        epoch, place = self._epochs.place_within(left)
        return WorkerPosition(epoch, place, samples).to_numbers()

    def received(self, own: int) -> int:
        client = self._exchange.reach()
        if not self._is_chief:
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
        return not (self._is_chief and self._state.accumulates)

    def begin_epoch(self, epoch: int) -> None:
        if not self._starts:
            place = EpochPlace(position=None, epoch_step=0, epochs=0, passes=0, ranks=self._size)
            self._starts = [WorkerPosition(epoch, place, 0)] * self._size

    def collect(self) -> Sequence[WorkerPosition]:
        # Gradients of the chief that wait to be sent belong to what it has done.
        self._exchange.send_rest()
        states = self._servers.buffers()
        weights, numbers = self._exchange.reach().snapshot(self._size, states)
        self._exchange.show(weights)
        self._servers.put(states)
        return [self._position_of(rank, numbers[rank]) for rank in range(1, self._size)]

    def _position_of(self, rank: int, numbers: tuple[int, ...]) -> WorkerPosition:
        assert self._epochs is not None
        first = self._starts[rank]
        if numbers == NO_POSITION:
            return first
        begins = dict(self._epochs.begins)
        if first.place.position is not None:
            begins[first.place.position.epoch] = first.place.position
        return WorkerPosition.from_numbers(numbers, ranks=self._size, begins=begins)

    def were_behind(self, epoch: int) -> bool:
        return any(start.epoch < epoch for start in self._starts)

    def until_all_have_ended(self, *, stop: bool) -> Iterator[None]:
        client = self._exchange.reach()
        client.leave(stop=stop and self._is_chief)
        pause_s = _SHORTEST_PAUSE_S
        with report.during("waiting for other workers"):
            while client.training:
                yield
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_S)
                client.look()
