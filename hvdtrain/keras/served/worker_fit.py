"""``fit`` on a worker of a job with parameter servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.single import single_collectives
from hvdtrain.errors import Preempted
from hvdtrain.keras.callback_list import list_callbacks
from hvdtrain.keras.chief_failover import CHIEF_ONLY
from hvdtrain.keras.fit_loop import FitLoop
from hvdtrain.keras.membership import Membership
from hvdtrain.keras.saving.checkpoint_callback import find_checkpoint_callback
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession
from hvdtrain.keras.served.served_fit import ServedJob
from hvdtrain.keras.served.worker_checkpoints import begin_worker_session
from hvdtrain.keras.served.worker_exchange import WorkerExchange
from hvdtrain.keras.served.worker_resume import WorkerResume
from hvdtrain.parameter_server.client import Client
from hvdtrain.private_api.keras import split_validation

__all__ = ["IndependentWorker", "WorkerFit"]

# They decide by validation results, or for all: the chief's decide.
_CHIEF_DECIDES = (
    *CHIEF_ONLY,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class IndependentWorker(Membership):
    """A worker's place among workers that never meet; it stays within a ``fit``.

    Args:
        worker: The number that this worker had at first.
        workers: Those of all workers.
    """

    def __init__(self, worker: int, workers: Sequence[int]) -> None:
        super().__init__(single_collectives(), min_np=1)
        self._me = worker
        self.meet(workers)

    def meet(self, workers: Sequence[int]) -> None:
        """Take a place among all workers that there are now."""
        self.members = tuple(workers)


class WorkerFit:
    """What ``fit`` is on a worker.

    Args:
        job: What this rank has.
        exchange: What its steps exchange with the servers.
        worker: This worker among all.
        presharded: Whether each worker passes data of its own.
    """

    def __init__(
        self,
        job: ServedJob,
        exchange: WorkerExchange,
        worker: IndependentWorker,
        *,
        presharded: bool,
    ) -> None:
        self._job = job
        self._exchange = exchange
        self._worker = worker
        self._presharded = presharded
        self._resume: WorkerResume | None = None
        self._session: CheckpointSession | None = None

    def run(self, loop: FitLoop, arguments: inspect.BoundArguments) -> Any:
        """Train until all workers have ended.

        Args:
            loop: What this worker runs by itself.
            arguments: Those that ``fit`` was called with.

        Raises:
            Preempted: A signal came to some rank, and a checkpoint was saved.
        """
        exchange, shards = self._exchange, self._job.shards
        self._worker.meet(self._job.meet())
        given = arguments.arguments
        callbacks = list_callbacks(given.get("callbacks"))
        if not self._is_chief:
            # Who validates is the chief; the others go on training meanwhile.
            callbacks = [entry for entry in callbacks if not isinstance(entry, _CHIEF_DECIDES)]
            _train_alone(given)
        checkpoint = find_checkpoint_callback(callbacks)
        if checkpoint is not None:
            self._session, self._resume = begin_worker_session(
                self._job,
                checkpoint,
                callbacks,
                exchange,
                worker=self._worker,
                presharded=self._presharded,
            )
        client = Client(
            self._job.messages, shards.specs, shards.roles.servers, shards.shards, shards.memory
        )

        def finish() -> None:
            exchange.send_rest()
            if checkpoint is not None and checkpoint.session is not None:
                checkpoint.session.finish()
            exchange.assign(self._finish(client, stop=bool(self._job.model.stop_training)))
            if self._is_chief:
                shards.state.finalize()

        given["callbacks"] = [_FollowsOthers(client, exchange, finish), *callbacks]
        ended_by = 0
        try:
            with exchange.using(client):
                history = loop.fit(*arguments.args, **arguments.kwargs)
        except Preempted as ended:
            ended_by = ended.signal
            client.own_signal = ended_by if self._is_chief else 0
            self._finish(client, stop=True)
        finally:
            client.close()
            self._session = self._resume = None
        self._job.end_if_preempted(ended_by if self._is_chief else client.signal)
        self._job.end(client.pushed, None, history)
        return history

    def begin(self) -> None:
        """Give the servers what the chief has, and all workers what the servers have."""
        client = self._exchange.reach()
        if self._is_chief:
            if self._resume is not None:
                self._resume.restore_shared()
            weights = [np.asarray(v.numpy()) for v in self._job.model.trainable_variables]
            client.load(weights, self._job.shards.state.take())
        self._exchange.pull()

    def session(self) -> CheckpointSession:
        """The checkpoints of the ``fit`` that has begun on this worker."""
        assert self._session is not None
        return self._session

    def _finish(self, client: Client, *, stop: bool) -> list[np.ndarray]:
        """Wait for the others; the last weights, and on the chief the optimizer's last state."""
        if not self._is_chief:
            return client.end()
        states = self._job.shards.state.buffers()
        weights = client.end(stop=stop, states=states)
        self._job.shards.state.put(states)
        return weights

    @property
    def _is_chief(self) -> bool:
        return self._job.collectives.rank == 0


def _train_alone(given: dict[str, Any]) -> None:
    """Take validation out of the arguments of ``fit``, with the data that belong to it."""
    part = given.pop("validation_split", 0.0)
    if part and given.pop("validation_data", None) is None:
        names = ("x", "y", "sample_weight")
        arrays, _ = split_validation(tuple(given.get(name) for name in names), part)
        given.update(zip(names, arrays))
    given["validation_data"] = None


class _FollowsOthers(keras.callbacks.Callback):
    """Ends the training when another worker has ended it for all, and waits for the others.

    Before the user's callbacks: they are to see the weights that count, and what they give the
    model as training ends is to stay.

    Args:
        client: Is told so by the servers.
        exchange: Knows which weights the model should have.
        finish: Takes the last weights.
    """

    def __init__(
        self, client: Client, exchange: WorkerExchange, finish: Callable[[], None]
    ) -> None:
        super().__init__()
        self._client = client
        self._exchange = exchange
        self._finish = finish

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._exchange.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._exchange.go_on()

    def on_test_begin(self, logs: Any = None) -> None:
        self._exchange.show_newest()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._exchange.show_newest()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._client.stopped:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self._finish()
