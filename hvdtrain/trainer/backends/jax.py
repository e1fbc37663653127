"""The steps of a model with Keras' JAX backend.

Keras' or the user's own steps run on this rank's batch. They take the state of the model and return
its new state. The optimizers weight the gradients, and average them over the ranks in a callback of
the compiled step. What is known before a step, such as the number of rows, is passed to the
compiled step as data.

A compiled step frees the state that it receives. If a reduction fails, the step completes, and
returns this state (``frameworks/jax/step_errors.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from keras import ops

from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.frameworks.jax.step_errors import errors
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import keep_state, loop_over_steps
from hvdtrain.trainer.backends.host_steps import HostSteps
from hvdtrain.trainer.data import Share
from hvdtrain.trainer.model_parts import optimizers_of
from hvdtrain.trainer.moving_statistics import StepRates
from hvdtrain.trainer.optimizer_mixins import Weighting
from hvdtrain.trainer.optimizer_patch import weighting
from hvdtrain.trainer.rank_random import random_by_rank
from hvdtrain.trainer.variables import array_of, attach_state

__all__ = ["JaxSteps", "check_model", "make_steps"]


def check_model(model: keras.Model) -> None:
    """Check that Keras does not distribute the model itself, and uses its own variables.

    Raises:
        ModelError: If ``keras.distribution`` is set, or if Keras uses the variables of Flax.
    """
    if keras.distribution.distribution() is not None:
        raise ModelError(
            "keras.distribution is set, so Keras would divide each batch itself. Leave out "
            "keras.distribution.set_distribution(…), because hvdtrain starts a process per GPU "
            "(hvdtrain run -np N)."
        )
    if keras.config.is_nnx_enabled():
        raise ModelError(
            "hvdtrain can't train Keras models with variables of Flax NNX; set "
            "KERAS_NNX_ENABLED=false."
        )


def make_steps(
    model: keras.Model,
    reducer: GradientReducer,
    settings: Settings,
    *,
    synchronized: Sequence[Any],
    warn: Callable[[str | None], None],
) -> JaxSteps:
    """Create the steps of a model, as ``interface.Backend`` describes."""
    return JaxSteps(model, reducer, settings, synchronized=synchronized)


class _Numbers(NamedTuple):
    """What a compiled training step receives in addition to its batch."""

    rows: Any
    joint_rows: Any
    factor: Any  # of Weighting
    weight: Any  # of Weighting
    rates: StepRates


class JaxSteps(HostSteps):
    """The steps of one model. ``interface.Steps`` describes the attributes."""

    def __init__(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        settings: Settings,
        *,
        synchronized: Sequence[Any],
    ) -> None:
        super().__init__(model, reducer, settings, synchronized=synchronized)
        self._train_step, self._test_step = model.train_step, model.test_step
        self._predict_step = model.predict_step
        self._on_batch = model.train_on_batch, model.test_on_batch, model.predict_on_batch
        self._op = Weighting().op
        self._communicates = reducer.collectives.size > 1 or self._elastic

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods to replace on the model, by name."""
        make = functools.partial
        return {
            "make_train_function": make(self._make, "train_function", self.train, self._train),
            "make_test_function": make(self._make, "test_function", self.test, self._test),
            "make_predict_function": make(
                self._make, "predict_function", self.predict, self._predict
            ),
            **{method.__name__: self._with_own_errors(method) for method in self._on_batch},
        }

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Raise the errors of steps, and give the model its values again.

        The values are those after the last completed step.
        """
        try:
            with errors.raised():
                yield
        except BaseException as error:
            attach_state(self._model)
            if _are_lost(self._model.variables[:1]):
                error.add_note(
                    f"The model {self._model.name!r} has lost its values, because JAX frees the "
                    "values that a step receives, and the step failed. Resume from a checkpoint, "
                    "or create the model again."
                )
            raise

    def _with_own_errors(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            with self.own_errors():
                return method(*args, **options)

        return call

    def _make(
        self, name: str, run: Callable[..., Any], step: Callable[..., Any], force: bool = False
    ) -> Any:
        """Make a function of Keras that calls ``run`` with the compiled step, a state and a batch.

        Args:
            name: Name of the function, which is an attribute of the model.
            run: Function that prepares a step on the host.
            step: Function to compile.
            force: Whether to replace an existing function.
        """
        model = self._model
        if getattr(model, name) is None or force:
            if model.jit_compile and not model.run_eagerly:
                # JAX would not trace the same function again.
                step = jax.jit(functools.partial(step), donate_argnums=0)

            def run_step(state: Any, data: Any) -> Any:
                results, state = run(step, state, data)
                keep_state(model, state)
                errors.check()
                return results, state

            loop = loop_over_steps(model, run_step, concatenate=name == "predict_function")

            def run_block(state: Any, iterator: Iterator[Any]) -> Any:
                keep_state(model, state)  # in case the iterator raises an error
                return loop(state, iterator)

            setattr(model, name, run_block)
        return getattr(model, name)

    def train(self, compiled: Callable[..., Any], state: Any, data: Any) -> Any:
        """Run a training step, and return its logs and the new state."""
        if isinstance(data, Share) and data.batch is None:
            return {}, state  # a step without data, from EpochIterator
        step = self.begin_training(data)
        how = step.weighting
        self._op = how.op  # the same in each step of a model
        numbers = _Numbers(
            np.int32(step.rows),
            np.int32(step.joint_rows),
            _float32(how.factor),
            _float32(how.weight),
            self.statistics.begin_step(float(step.row_weight)),
        )
        with random_by_rank(self._member):
            results = compiled(state, step.batch, numbers)
        if self._elastic:
            # The training loop looks at the contributions of the step.
            jax.effects_barrier()
        return results

    def test(self, compiled: Callable[..., Any], state: Any, data: Any) -> Any:
        """Run a test step, and return its logs and the new state."""
        batch, rows, joint_rows = self.begin_test(data)
        counts = [n if n is None else np.int32(n) for n in (rows, joint_rows)]
        return compiled(state, batch, *counts)

    def predict(self, compiled: Callable[..., Any], state: Any, data: Any) -> Any:
        """Run a prediction step, record its rows, and return its outputs and the new state."""
        return compiled(state, self.begin_prediction(data))

    def _train(self, state: Any, batch: Any, numbers: _Numbers) -> Any:
        """Run the model's ``train_step``. This function is compiled."""
        how = Weighting(factor=numbers.factor, weight=numbers.weight, op=self._op)
        self.step_rows, self.step_weight = numbers.rows, numbers.factor
        try:
            with (
                errors.kept(),
                self.additive.trying(),
                self._weights.joint_loss(numbers.rows, numbers.joint_rows, "train") as terms,
                weighting(optimizers_of(self._model), self.with_terms(how, terms), jit=False),
            ):
                logs, new = self._train_step(state, batch)
        finally:
            self.step_rows = self.step_weight = None
        trainable, others, optimizer, metrics = new
        others = self._weigh_statistics(state[1], others, numbers.rates)
        logs, metrics = self._keep_metrics(logs, state[3], metrics, numbers.rows)
        new = trainable, others, optimizer, metrics
        if self._communicates:
            new = errors.unless_failed(state, new)
        return logs, new

    def _test(self, state: Any, batch: Any, rows: Any, joint_rows: Any) -> Any:
        """Run the model's ``test_step``. This function is compiled."""
        with (
            errors.kept(),
            self.additive.trying(),
            self._weights.joint_loss(rows, joint_rows, "test"),
        ):
            logs, (trainable, others, metrics) = self._test_step(state, batch)
        if rows is not None:
            logs, metrics = self._keep_metrics(logs, state[2], metrics, rows)
        return logs, (trainable, others, metrics)

    def _predict(self, state: Any, batch: Any) -> Any:
        """Run the model's ``predict_step``. This function is compiled."""
        outputs, others = self._predict_step(state, batch)
        return outputs, (state[0], others)

    def _weigh_statistics(self, before: Any, after: Any, rates: StepRates) -> list[Any]:
        """Weight the update of layer statistics by the rows of this rank's batch.

        ``before`` and ``after`` are the values of ``model.non_trainable_variables``.
        """
        places = {id(v): n for n, v in enumerate(self._model.non_trainable_variables)}
        indices = [places[id(variable)] for variable in self.statistics.variables]
        moved = self.statistics.moved(
            [before[n] for n in indices], [after[n] for n in indices], rates
        )
        values = list(after)
        for n, value in zip(indices, moved):
            values[n] = value
        return values

    def _keep_metrics(self, logs: Any, before: Any, after: Any, rows: Any) -> tuple[Any, list[Any]]:
        """Return logs and metrics of a step. Metrics don't change if no rows of its batch count.

        ``before`` and ``after`` are the values of ``model.metrics_variables``.
        """
        counts = ops.greater(rows, 0)
        values = [ops.where(counts, new, old) for new, old in zip(after, before)]
        if isinstance(logs, dict):
            variables = self._model.metrics_variables
            with keras.StatelessScope(list(zip(variables, values))):
                results = self._model.get_metrics_result()
            keep = functools.partial(ops.where, counts)
            logs = {
                # The result of a metric may be a dictionary.
                name: keras.tree.map_structure(keep, value, results[name])
                if name in results
                else value
                for name, value in logs.items()
            }
        return logs, values


def _are_lost(variables: Sequence[Any]) -> bool:
    try:
        list(map(array_of, variables))
    except Exception:  # without a value, or with one that JAX has freed
        return True
    return False


def _float32(number: float | None) -> Any:
    return None if number is None else np.float32(number)
