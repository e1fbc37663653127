"""Elastic averaging: workers train by themselves, and are held together by the servers' weights.

EASGD (Zhang, Choromanska and LeCun 2015, "Deep learning with elastic averaging SGD", arXiv
1412.6651), asynchronous: every so many updates a worker takes the center c, moves its own weights x
by -rate * (x - c), and the servers move the center by as much towards x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.kernels import widen
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.served.server_optimizer_state import ServerOptimizerState
from hvdtrain.keras.served.worker_link import WorkerLink
from hvdtrain.parameter_server.shard_optimizer import plain_optimizer

__all__ = ["ElasticExchange", "check_elastic", "servers_optimizer"]


class ElasticExchange(WorkerLink):
    """Follows the optimizer's updates on a worker.

    Outside of its steps the model has the center's weights: for validation, callbacks at the end
    of an epoch, and checkpoints.

    Args:
        model: Compiled and built.
        reducer: Keeps the errors that TensorFlow hides.
        steps: Of the model.
        require_finite: Refuse weights with NaN or infinity.
        every: Updates from one exchange to the next; tau in the paper.
        rate: How far both sides move, from 0 to 1; alpha in the paper.
        averages: As for ``WorkerLink``.
    """

    def __init__(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        steps: ModelSteps,
        *,
        require_finite: bool,
        every: int,
        rate: float,
        averages: ServerOptimizerState | None,
    ) -> None:
        super().__init__(model, reducer, steps, require_finite=require_finite, averages=averages)
        self._every = every
        self._rate = rate
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
        averages = self._averages
        self.show(
            averages.newest_weights(self.reach()) if averages is not None else self.reach().pull()
        )

    def _forget(self) -> None:
        self._updates = 0
        self._own = None

    def _count(self) -> np.ndarray:
        self._updates += 1
        return np.array(self._updates >= self._every)

    def _exchange(self) -> None:
        def run(ran: np.ndarray, samples: np.ndarray, *own: np.ndarray) -> list[np.ndarray]:
            with self._reducer.remember_error():
                self._updates = 0
                self._check_finite(own, "A weight of this worker")
                client = self.reach()
                moves = [self._move(x, c) for x, c in zip(own, client.pull())]
                # Gradient descent with a rate of 1 adds them to the center.
                client.push(
                    [-move for move in moves],
                    weight=1.0,
                    learning_rate=math.nan,
                    position=self._position(ran, samples),
                )
                return [np.asarray(x - move, x.dtype) for x, move in zip(own, moves)]

        now = [tf.convert_to_tensor(variable.value) for variable in self._variables]
        self._run(run, [*self._counted(), *now])

    def _move(self, own: np.ndarray, center: np.ndarray) -> np.ndarray:
        apart = widen(own) - widen(center)
        return np.asarray(self._rate * apart).astype(own.dtype, copy=False)


def servers_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """What servers move the center with; it averages it as the model's would its weights."""
    asked = plain_optimizer(model.optimizer)
    optimizer = keras.optimizers.SGD(
        1.0,
        use_ema=asked.use_ema,
        ema_momentum=asked.ema_momentum,
        ema_overwrite_frequency=asked.ema_overwrite_frequency,
    )
    optimizer.build(model.trainable_variables)
    return optimizer


def check_elastic(model: keras.Model) -> None:
    """See that the weights can be averaged.

    Raises:
        ModelError: They can't.
    """
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"{variable.path} is no weight that could be averaged: float8 keeps scales among "
                "the variables. Use another dtype policy, or another --mode than easgd."
            )
