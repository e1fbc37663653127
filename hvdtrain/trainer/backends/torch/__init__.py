"""The steps of a model with Keras' torch backend.

Keras' or the user's own steps run on this rank's batch. The optimizers weight the gradients, and
average them over the ranks. Everything else happens before and after the step, in the function that
Keras' loops call. ``torch.compile`` may compile that function, and would compile it again whenever
a Python number in it changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import torch

from hvdtrain.config import Settings
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.backends.host_steps import HostSteps
from hvdtrain.trainer.model_parts import optimizers_of, overrides
from hvdtrain.trainer.optimizer_patch import weighting
from hvdtrain.trainer.rank_random import random_by_rank

__all__ = ["TorchSteps", "check_model", "make_steps"]


def check_model(model: keras.Model) -> None:
    """Check that Keras does not average the gradients itself.

    Since version 3.16, Keras wraps models in ``DistributedDataParallel`` if the program has
    initialized ``torch.distributed``.

    Raises:
        ModelError: If Keras averages the gradients.
    """
    if hasattr(model, "ddp_model") and (
        model.ddp_model is not None or torch.distributed.is_initialized()
    ):
        raise ModelError(
            "torch.distributed is initialized, so Keras would average gradients a second time. "
            "Leave out torch.distributed.init_process_group(…), because hvdtrain connects the "
            "ranks itself."
        )


def make_steps(
    model: keras.Model,
    reducer: GradientReducer,
    settings: Settings,
    *,
    synchronized: Sequence[Any],
    warn: Callable[[str | None], None],
) -> TorchSteps:
    """Create the steps of a model, as ``interface.Backend`` describes."""
    return TorchSteps(model, reducer, settings, synchronized=synchronized)


class TorchSteps(HostSteps):
    """The steps of one model. ``interface.Steps`` describes the attributes."""

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods to replace on the model, by name."""
        steps = {"train": self.train, "test": self.test, "predict": self.predict}
        return {
            f"make_{name}_function": functools.partial(
                self._make_function, f"{name}_function", self._plain_make(name), step
            )
            for name, step in steps.items()
        }

    def _plain_make(self, name: str) -> Callable[[bool], Any]:
        plain: Callable[[bool], Any] = getattr(self._model, f"make_{name}_function")
        return plain

    def _make_function(
        self, name: str, make: Callable[[bool], Any], step: Callable[..., Any], force: bool = False
    ) -> Any:
        """Make a function of Keras that calls ``step`` with the plain function and the data."""
        model = self._model
        if getattr(model, name) is None or force:
            make(force)
            function = getattr(model, name)
            if model.jit_compile and name == "train_function":
                # torch.compile divides a function at backward(), and traces all its callers again.
                # Keras would compile a caller of train_step.
                function = functools.partial(_run_on_first, torch.compile(model.train_step))
            setattr(model, name, functools.partial(step, function))
        return getattr(model, name)

    def train(self, function: Callable[[Any], Any], data: Sequence[Any]) -> Any:
        """Run a training step of Keras on this rank's batch, and return its logs."""
        step = self.begin_training(data[0])
        rates = self.statistics.begin_step(step.row_weight)
        moving = [] if rates.even else self.statistics.variables
        before = _values(moving)
        self.step_rows = self._number(step.rows)
        how = step.weighting
        how = how._replace(factor=None if how.factor is None else self._number(how.factor))
        self.step_weight = how.factor
        jit = bool(self._model.jit_compile)
        if jit and not overrides(self._model, "train_step"):
            # Only the first step has no old gradients, so the second would be compiled again.
            self._model.zero_grad()
        try:
            with (
                self._metrics_of(step.rows),
                random_by_rank(self._member),
                self._joint_loss(step.rows, step.joint_rows, "train") as terms,
                weighting(optimizers_of(self._model), self.with_terms(how, terms), jit),
            ):
                logs = function([step.batch])
        finally:
            self.step_rows = self.step_weight = None
        if moving:
            _assign(moving, self.statistics.moved(before, _values(moving), rates))
        return self._logs_of(step.rows, logs)

    def test(self, function: Callable[[Any], Any], data: Sequence[Any]) -> Any:
        """Run a test step of Keras. If no rows of the batch count, the metrics don't change."""
        batch, rows, joint_rows = self.begin_test(data[0])
        counts = int(self.rows.value)
        with self._metrics_of(counts), self._joint_loss(rows, joint_rows, "test"):
            logs = function([batch])
        return self._logs_of(counts, logs)

    def predict(self, function: Callable[[Any], Any], data: Sequence[Any]) -> Any:
        """Run a prediction step of Keras, and record its rows."""
        return function([self.begin_prediction(data[0])])

    def _joint_loss(self, rows: int | None, joint_rows: int | None, kind: str) -> Any:
        own, joint = (None if n is None else self._number(n) for n in (rows, joint_rows))
        return self._weights.joint_loss(own, joint, kind)

    def _number(self, value: float) -> Any:
        """Return a number in a form that ``torch.compile`` does not take as a constant."""
        return torch.tensor(float(value)) if self._model.jit_compile else value

    @contextmanager
    def _metrics_of(self, rows: int) -> Iterator[None]:
        """Keep the metrics unchanged in the ``with`` block if no rows of the batch count."""
        variables = [] if rows else list(self._model.metrics_variables)
        before = _values(variables)
        with self.additive.trying() if rows else nullcontext():
            yield
        _assign(variables, before)

    def _logs_of(self, rows: int, logs: Any) -> Any:
        """Return the logs of a step, with the metrics' results if no rows of the batch count."""
        if rows or not isinstance(logs, dict):
            return logs
        results = self._model.get_metrics_result()
        return {name: results.get(name, value) for name, value in logs.items()}


def _run_on_first(step: Callable[[Any], Any], data: Sequence[Any]) -> Any:
    return step(data[0])


def _values(variables: Sequence[Any]) -> list[torch.Tensor]:
    """Return copies of the variables' values, which torch changes in place."""
    return [keras.ops.convert_to_tensor(variable).detach().clone() for variable in variables]


def _assign(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    for variable, value in zip(variables, values):
        variable.assign(value)
