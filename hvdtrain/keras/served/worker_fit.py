"""``fit`` on a worker of a job with parameter servers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.engine import single_engine
from hvdtrain.errors import Preempted
from hvdtrain.keras.callback_list import CHIEF_ONLY, list_callbacks
from hvdtrain.keras.fit_loop import FitLoop
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.saving.checkpoint_callback import find_checkpoint_callback
from hvdtrain.keras.served.gradient_exchange import GradientExchange
from hvdtrain.keras.served.served_fit import ServedJob
from hvdtrain.keras.served.worker_checkpoints import WorkerSession, begin_worker_session
from hvdtrain.parameter_server.client import Client
from hvdtrain.private_api.keras import split_validation

__all__ = ["WorkerFit"]

# They decide by validation results, or for all: the chief's decide.
_CHIEF_DECIDES = (
    *CHIEF_ONLY,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class _IndependentWorker(Membership):
    """A worker's place among workers that never meet; it stays within a ``fit``."""

    def __init__(self, worker: int, workers: Sequence[int]) -> None:
        super().__init__(single_engine(), min_np=1)
        self._me = worker
        self.members = tuple(workers)


class WorkerFit(keras.callbacks.Callback):
    """Takes the place of ``fit`` on a worker.

    Within it, it is the first callback: it ends the training when another worker has ended it for
    all, and waits for the others. The user's callbacks are to see the weights that count, and what
    they give the model as training ends is to stay.
    """

    def __init__(self, job: ServedJob, exchange: GradientExchange) -> None:
        super().__init__()
        self.job = job
        self.worker = _IndependentWorker(job.collectives.member, job.shards.roles.workers)
        """This worker among all."""
        self._exchange = exchange
        self._session: WorkerSession | None = None

    def run(self, loop: FitLoop, arguments: inspect.BoundArguments) -> Any:
        """Train by ``loop``, with the arguments of ``fit``, until all workers have ended.

        Raises:
            Preempted: A signal came to some rank, and a checkpoint was saved.
        """
        exchange, shards = self._exchange, self.job.shards
        self.worker.members = self.job.meet()
        given = arguments.arguments
        callbacks = list_callbacks(given.get("callbacks"))
        if not self.job.is_chief:
            # Who validates is the chief; the others go on training meanwhile.
            callbacks = [entry for entry in callbacks if not isinstance(entry, _CHIEF_DECIDES)]
            _train_alone(given)
        checkpoint = find_checkpoint_callback(callbacks)
        if checkpoint is not None:
            self._session = begin_worker_session(
                self.job, checkpoint, callbacks, exchange, self.worker
            )
        client = Client(
            self.job.messages, shards.specs, shards.roles.servers, shards.shards, shards.memory
        )
        given["callbacks"] = [self, *callbacks]
        ended_by = 0
        try:
            with self.job.collectives.abort_on_error(), exchange.using(client):
                history = loop.fit(*arguments.args, **arguments.kwargs)
        except Preempted as ended:
            ended_by = ended.signal
            client.own_signal = ended_by if self.job.is_chief else 0
            self._finish(client, stop=True)
        finally:
            client.close()
            self._session = None
        self.job.end_if_preempted(ended_by if self.job.is_chief else client.signal)
        self.job.end(client.pushed, None, history)
        return history

    def begin(self) -> None:
        """Give the servers what the chief has, and all workers what the servers have."""
        client = self._exchange.reach()
        if self.job.is_chief:
            if self._session is not None:
                self._session.restore_shared()
            weights = [np.asarray(v.numpy()) for v in self.job.model.trainable_variables]
            client.load(weights, self.job.shards.state.take())
        self._exchange.pull()

    def session(self) -> WorkerSession:
        """Returns the checkpoints of the ``fit`` that has begun on this worker."""
        assert self._session is not None
        return self._session

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._exchange.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._exchange.begin_step()

    def on_test_begin(self, logs: Any = None) -> None:
        self._exchange.show_newest()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._exchange.show_newest()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._exchange.reach().stopped:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        if self._session is not None:
            self._session.finish()
        client, stop = self._exchange.reach(), bool(self.model.stop_training)
        self._exchange.assign(self._finish(client, stop=stop))
        if self.job.is_chief:
            self.job.shards.state.finalize()

    def _finish(self, client: Client, *, stop: bool) -> list[np.ndarray]:
        """Wait for the others; returns the last weights, and gives the chief the last state."""
        if not self.job.is_chief:
            return client.end(stop=stop)
        states = self.job.shards.state.buffers()
        weights = client.end(stop=stop, states=states)
        self.job.shards.state.put(states)
        return weights


def _train_alone(given: dict[str, Any]) -> None:
    """Take validation out of the arguments of ``fit``, with the data that belong to it."""
    part = given.pop("validation_split", 0.0)
    if part and given.pop("validation_data", None) is None:
        names = ("x", "y", "sample_weight")
        arrays, _ = split_validation(tuple(given.get(name) for name in names), part)
        given.update(zip(names, arrays))
    given["validation_data"] = None
