"""Elastic averaging: workers train by themselves, and are held together by the servers' weights.

EASGD (Zhang, Choromanska and LeCun 2015, "Deep learning with elastic averaging SGD", arXiv
1412.6651), asynchronous: every so many updates a worker takes the center c, moves its own weights x
by -rate * (x - c), and the servers move the center by as much towards x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.kernels import widen
from hvdtrain.keras.own_updates import UpdatesAlone
from hvdtrain.keras.served.served_fit import ServedJob
from hvdtrain.keras.served.worker_exchange import AveragesElsewhere, WorkerExchange
from hvdtrain.parameter_server.client import Client

__all__ = ["ElasticExchange"]

# How far all workers together move the center: beta in Zhang et al. 2015.
DEFAULT_FORCE = 0.9


class _AveragesElastically(AveragesElsewhere, UpdatesAlone):
    """A mixin: a plain optimizer also exchanges with the servers; saved as the plain class."""

    _hvdtrain_reducer: ElasticExchange

    def _hvdtrain_after_update(self) -> None:
        self._hvdtrain_reducer.after_update()


class ElasticExchange(WorkerExchange):
    """Follows the optimizer's updates on a worker.

    Outside of its steps the model has the center's weights: for validation, callbacks at the end
    of an epoch, and checkpoints.

    The settings' ``push_every`` is tau in the paper, their moving rate alpha.
    """

    mixin = _AveragesElastically

    def __init__(self, job: ServedJob) -> None:
        super().__init__(job)
        self._every = job.settings.push_every
        force = DEFAULT_FORCE / len(job.shards.roles.workers)
        self._rate = job.settings.moving_rate or force
        self._updates = 0  # since the last exchange
        # This worker's weights while others are shown.
        self._own: list[np.ndarray] | None = None

    def after_update(self) -> None:
        """Exchange with the servers, if it is time to; as part of a step."""
        due = tf.numpy_function(self._count, [], tf.bool)
        due.set_shape([])
        tf.cond(due, self._exchange, lambda: None)

    def go_on(self) -> None:
        if self._own is not None:
            self.assign(self._own)
            self._own = None

    def show(self, weights: Sequence[np.ndarray]) -> None:
        if self._own is None:
            self._own = [np.array(variable.numpy()) for variable in self._variables]
        self.assign(weights)

    def show_newest(self) -> None:
        averages, client = self._averages, self.reach()
        self.show(client.pull() if averages is None else averages.newest_weights(client))

    def _forget(self) -> None:
        self._updates = 0
        self._own = None

    def _count(self) -> np.ndarray:
        self._updates += 1
        return np.array(self._updates >= self._every)

    def _exchange(self) -> None:
        def exchange(
            client: Client, position: tuple[int, ...], *own: np.ndarray
        ) -> list[np.ndarray]:
            self._updates = 0
            self._check_finite(own, "A weight of this worker")
            moves = [self._move(x, c) for x, c in zip(own, client.pull())]
            # Gradient descent with a rate of 1 adds them to the center.
            back = [-move for move in moves]
            client.push(back, weight=1.0, learning_rate=math.nan, position=position)
            return [np.asarray(x - move, x.dtype) for x, move in zip(own, moves)]

        self._run(exchange, [tf.convert_to_tensor(variable.value) for variable in self._variables])

    def _move(self, own: np.ndarray, center: np.ndarray) -> np.ndarray:
        difference = widen(own) - widen(center)
        return np.asarray(self._rate * difference).astype(own.dtype, copy=False)
