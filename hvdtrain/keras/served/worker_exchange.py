"""The exchange of a worker's model with the servers, whatever it is that travels between them.

A worker's optimizer leaves something to the servers: the update of the variables, or to keep the
workers together. What each step counts for is told to it beside the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from hvdtrain.errors import ModelError, NonFiniteError
from hvdtrain.gradients.non_finite import name_non_finite
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.optimizer_patch import plain_optimizers
from hvdtrain.keras.own_updates import OwnLossWeights, WeighsSteps, weigh_steps
from hvdtrain.keras.served.served_fit import ServedJob
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.gradients import Gradient, Rows
from hvdtrain.parameter_server.protocol import NO_POSITION

__all__ = ["AveragesElsewhere", "WorkerExchange", "WorkerLossWeights", "refuse_training"]


class AveragesElsewhere:
    """Leaves the averages of weights (use_ema) to the servers."""

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        pass

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        pass


class WorkerLossWeights(OwnLossWeights):
    """Weighs losses of a worker; ``gathers`` is whether servers sum gradients of several."""

    def __init__(self, reducer: GradientReducer, *, gathers: bool) -> None:
        super().__init__(reducer)
        self._gathers = gathers

    def weight(
        self,
        kind: str,
        rows: tf.Tensor,
        joint_rows: tf.Tensor | None = None,
        sample_weight: Any = None,
    ) -> tf.Tensor:
        if kind == "sum" and self._gathers:
            raise ModelError(
                "Losses with reduction='sum' can't be put together by parameter servers that make "
                "a step of several workers' gradients. Use reduction='sum_over_batch_size', "
                "--mode async-ps without --staleness-bound 0, or --mode allreduce."
            )
        return super().weight(kind, rows, joint_rows, sample_weight)


class WorkerExchange:
    """Stands between a worker's optimizer and the servers of a job."""

    mixin: type[WeighsSteps]
    """Mixed into the classes of plain optimizers; finds this object as ``_hvdtrain_reducer``."""

    def __init__(self, job: ServedJob) -> None:
        self._variables = list(job.model.trainable_variables)
        self._reducer = job.reducer
        self._steps = job.steps
        self._require_finite = job.settings.non_finite == "error"
        self._is_chief = job.is_chief
        state = job.shards.state
        # It is the chief that shows averages of the weights.
        self._averages = state if job.is_chief and state.has_averages else None
        self.client: Client | None = None
        """The way to the servers, within ``fit``."""
        self.position: Callable[[int, int], tuple[int, ...]] | None = None
        """Says where this worker is in its data, from what ``ModelSteps`` counts; or None."""

    def attach(self, optimizer: Any) -> None:
        """Let ``optimizer`` exchange with the servers; it is saved, and loaded, as it was."""
        for leaf in plain_optimizers(optimizer):
            weigh_steps(leaf, self.mixin, self)

    @contextmanager
    def using(self, client: Client) -> Iterator[None]:
        """Within the block the model trains, through ``client``."""
        self.client = client
        self._forget()
        try:
            yield
        finally:
            self.client = self.position = None

    def pull(self) -> None:
        """Take the newest weights."""
        self.assign(self.reach().pull())

    def assign(self, weights: Sequence[np.ndarray]) -> None:
        """Give the model other weights, of all trainable variables."""
        for variable, value in zip(self._variables, weights):
            variable.assign(value)

    def reach(self) -> Client:
        """Returns the way to the servers, or raises ModelError where there is none now."""
        if self.client is None:
            refuse_training()
        return self.client

    # What happens within ``fit``.

    def begin_epoch(self) -> None:
        """Call before the first step of an epoch."""

    def go_on(self) -> None:
        """Call before each step, or each block of steps."""

    def show(self, weights: Sequence[np.ndarray]) -> None:
        """Let the model have weights of the servers until training goes on."""
        self.assign(weights)

    def show_newest(self) -> None:
        """Let the model have the servers' weights for what comes after a step: validation."""

    def send_rest(self) -> list[np.ndarray] | None:
        """Send what waits for more steps; returns weights if there was any."""
        return None

    def _forget(self) -> None:
        """Forget what was not sent yet; called as ``fit`` begins."""

    def _position_after(self, ran: Any, samples: Any) -> tuple[int, ...]:
        return NO_POSITION if self.position is None else self.position(int(ran), int(samples))

    def _run(
        self, exchange: Callable[..., Sequence[np.ndarray] | None], inputs: Sequence[tf.Tensor]
    ) -> None:
        """Exchange with the servers as part of a step.

        ``exchange`` is Python that returns the model's next weights, or None where it keeps its
        own. It is called with the way to the servers, this worker's position after the step, and
        ``inputs`` as arrays.
        """
        types = [tf.as_dtype(variable.dtype) for variable in self._variables]
        nothing = [np.empty(0, dtype.as_numpy_dtype) for dtype in types]

        def run(ran: np.ndarray, samples: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            with self._reducer.remember_error():
                position = self._position_after(ran, samples)
                weights = exchange(self.reach(), position, *arrays)
                return [np.array(weights is not None), *(weights or nothing)]

        def assign() -> None:
            for variable, value in zip(self._variables, weights):
                value.set_shape(variable.shape)
                variable.assign(value)

        counted = [tf.identity(v.value) for v in (self._steps.ran, self._steps.samples)]
        came, *weights = tf.numpy_function(run, [*counted, *inputs], [tf.bool, *types])
        came.set_shape([])
        tf.cond(came, assign, lambda: None)

    def _check_finite(self, sent: Sequence[Gradient], what: str) -> None:
        """Raise NonFiniteError if what is to be sent of some variables holds NaN or infinity.

        ``what`` is the name of one of them, for the error.
        """
        if not self._require_finite:
            return
        names = [v.path for v, entry in zip(self._variables, sent) if entry is not None]
        values = [e.values if isinstance(e, Rows) else e for e in sent if e is not None]
        if bad := name_non_finite(names, values):
            raise NonFiniteError(
                f"{what} is not finite: {', '.join(bad[:5])}. It was not sent to the parameter "
                "servers. Lower the learning rate, clip gradients or look at the data of this "
                "rank; HVDTRAIN_NON_FINITE=ignore lets such values through."
            )


def refuse_training() -> NoReturn:
    """Raise ModelError where a model is to train outside of ``fit``."""
    raise ModelError(
        "With parameter servers a model trains in fit alone: there is nobody to take the gradients "
        "of train_on_batch, or of a training loop of your own. Call model.fit, or leave --mode out."
    )
