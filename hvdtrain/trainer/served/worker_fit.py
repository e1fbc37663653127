"""``fit`` on a worker of a job with parameter servers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.engine import single_engine
from hvdtrain.errors import Preempted
from hvdtrain.parameter_server.client import Client
from hvdtrain.private_api.keras_data import split_validation
from hvdtrain.trainer.callback_list import CHIEF_ONLY, list_callbacks
from hvdtrain.trainer.fit_loop import FitLoop
from hvdtrain.trainer.membership import Membership
from hvdtrain.trainer.saving.checkpoint_callback import find_checkpoint_callback
from hvdtrain.trainer.served.gradient_exchange import GradientExchange
from hvdtrain.trainer.served.served_fit import ServedJob
from hvdtrain.trainer.served.worker_checkpoints import WorkerSession

__all__ = ["WorkerFit"]

# Callbacks that need validation results, or that decide for all workers.
_CHIEF_DECIDES = (
    *CHIEF_ONLY,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class _WorkerMembership(Membership):
    """The rank of a worker, which stays the same because workers don't synchronize."""

    def __init__(self, worker: int, workers: Sequence[int]) -> None:
        super().__init__(single_engine(), min_np=1)
        self._me = worker
        self.members = tuple(workers)


class WorkerFit(keras.callbacks.Callback):
    """Runs ``fit`` on a worker. It is also the first callback of that ``fit``.

    Because it is the first callback, it loads weights from the servers before the user's callbacks
    read them. When training ends, it doesn't overwrite weights that the user's callbacks assign.
    """

    def __init__(self, job: ServedJob, exchange: GradientExchange) -> None:
        super().__init__()
        # the list of all workers, which determines this worker's rank among them
        self.membership = _WorkerMembership(job.collectives.member, job.roles.workers)
        self._session: WorkerSession | None = None
        self._job = job
        self._exchange = exchange

    def run(self, loop: FitLoop, arguments: inspect.BoundArguments) -> Any:
        """Train with ``loop`` and the arguments of ``fit`` until all workers are done.

        Raises:
            Preempted: If a rank received a signal. A checkpoint has been saved.
        """
        job, exchange = self._job, self._exchange
        self.membership.members = job.remaining_workers()
        given = arguments.arguments
        callbacks = list_callbacks(given.get("callbacks"))
        if not job.is_chief:
            # Other workers train while the chief validates.
            callbacks = [entry for entry in callbacks if not isinstance(entry, _CHIEF_DECIDES)]
            _remove_validation(given)
        checkpoint = find_checkpoint_callback(callbacks)
        if checkpoint is not None:
            self._session = WorkerSession(job, exchange, self.membership, checkpoint, callbacks)
        client = Client(job.messages, job.specs, job.roles.servers, job.shards, job.memory)
        given["callbacks"] = [self, *callbacks]
        signal = 0
        try:
            with job.collectives.abort_on_error(), exchange.connected(client):
                history = loop.fit(*arguments.args, **arguments.kwargs)
        except Preempted as preempted:
            signal = preempted.signal
            client.own_signal = signal if job.is_chief else 0
            self._end(client, stop=True)
        finally:
            client.close()
            self._session = None
        job.end_if_preempted(signal if job.is_chief else client.signal)
        job.end(client.pushed, None, history)
        return history

    def begin(self) -> None:
        """Load the weights from the servers, to which the chief has sent its weights."""
        if self._job.is_chief:
            if self._session is not None:
                self._session.restore_shared()
            weights = [np.asarray(v.numpy()) for v in self._job.model.trainable_variables]
            self._exchange.client.load(weights, self._job.pack_state())
        self._exchange.pull()

    def session(self) -> WorkerSession:
        """Return the session of the running ``fit``, which must have a ``Checkpoint``."""
        assert self._session is not None
        return self._session

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Load the newest weights from the servers."""
        self._exchange.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Load the newest weights again if a callback may have changed this worker's weights."""
        self._exchange.begin_step()

    def on_test_begin(self, logs: Any = None) -> None:
        """Load the newest weights and their moving averages from the servers."""
        self._exchange.load_newest()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Load the newest weights and their moving averages from the servers."""
        self._exchange.load_newest()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop training if another worker has stopped it."""
        if self._exchange.client.stopped:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for the other workers, and load the final weights."""
        if self._session is not None:
            self._session.finish()
        stop = bool(self.model.stop_training)
        self._exchange.assign(self._end(self._exchange.client, stop=stop))
        if self._job.is_chief:
            self._job.assign_averages()

    def _end(self, client: Client, *, stop: bool) -> list[np.ndarray]:
        """Wait for the other workers, and load final weights and, on the chief, the optimizer."""
        states = self._job.pack_state() if self._job.is_chief else []
        weights = client.end(stop=stop, states=states)
        if self._job.is_chief:
            self._job.load_state(states)
        return weights


def _remove_validation(given: dict[str, Any]) -> None:
    """Remove arguments of ``fit`` for validation, and the data of ``validation_split``."""
    part = given.pop("validation_split", 0.0)
    if part and given.pop("validation_data", None) is None:
        names = ("x", "y", "sample_weight")
        arrays, _ = split_validation(tuple(given.get(name) for name in names), part)
        given.update(zip(names, arrays))
    given["validation_data"] = None
