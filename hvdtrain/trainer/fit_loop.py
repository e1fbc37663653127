"""``fit``, ``evaluate`` and ``predict`` of a distributed model. They call Keras' own methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import keras

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import (
    BUILDS_IN_STEPS,
    RESULTS,
    SYMBOLIC_BUILD,
    build_symbolically,
)
from hvdtrain.private_api.keras_data import split_validation
from hvdtrain.trainer.backends.interface import Steps
from hvdtrain.trainer.callback_list import (
    CHIEF_ONLY,
    CallbacksOfSteps,
    ChiefFailover,
    StopTogether,
    list_callbacks,
    stops_at_nan,
)
from hvdtrain.trainer.data import ShardedInput
from hvdtrain.trainer.data.batch_structure import is_absent
from hvdtrain.trainer.epoch_iterator import EpochIterator
from hvdtrain.trainer.fit_inputs import FitInputs, InputWait
from hvdtrain.trainer.joint_results import (
    join_logs,
    join_predictions,
    joint_metrics,
    metric_results,
    result_array,
)
from hvdtrain.trainer.learning_rate import WarmUp
from hvdtrain.trainer.membership import ChangeCallback, Membership
from hvdtrain.trainer.model_parts import optimizers_of, overrides
from hvdtrain.trainer.model_sync import broadcast_model, check_equal
from hvdtrain.trainer.optimizer_patch import accumulates, is_distributed
from hvdtrain.trainer.saving.checkpoint_callback import (
    Checkpoint,
    begin_session,
    find_checkpoint_callback,
)
from hvdtrain.trainer.saving.checkpoint_session import CheckpointSession

if TYPE_CHECKING:
    from hvdtrain.trainer.local_sgd.weight_averaging import WeightAveraging

__all__ = ["FitLoop", "reset_functions"]

# The argument with which Keras' fit calls evaluate.
_WITHIN_FIT = "_use_cached_eval_dataset"

# Arguments that must be equal on all ranks, though they are not part of the input.
_LENGTH = ("epochs", "initial_epoch", "validation_freq")


def reset_functions(model: keras.Model) -> None:
    """Make Keras trace its train, test and predict functions again."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def _collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make all ranks enter and leave a method of ``FitLoop`` together, even after an error."""
    name, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method)
    def call(self: FitLoop, *args: Any, **options: Any) -> Any:
        if options.get(_WITHIN_FIT):
            return method(self, *args, **options)
        arguments: Mapping[str, Any] = {}
        with suppress(TypeError):
            arguments = signature.bind(self, *args, **options).arguments
        length = [f"{key}={arguments[key]}" for key in _LENGTH if key in arguments]
        with self._collectives.section(name, (f"model {self._number}", *length)):
            return method(self, *args, **options)

    return call


def _capped(steps: int | None) -> int | None:
    """Limit the steps of a loop by ``keras.config.set_max_steps_per_epoch``, as Keras does."""
    limit: int | None = keras.config.max_steps_per_epoch()
    return min(steps or limit, limit) if limit else steps


class FitLoop:
    """Distributed versions of a model's ``fit``, ``evaluate`` and ``predict``.

    These methods call Keras' methods of the same names.

    Args:
        inputs: Shards the training data.
        reducer: Averages gradients.
        steps: The model's steps.
        whole: Shards the data of ``evaluate`` and ``predict``. The default is ``inputs``.
        begin: Copies the chief's state to all ranks when training begins.
        begin_session: Function to call instead of ``saving.checkpoint_callback.begin_session``.
        averaging: Averages the weights periodically in ``--mode local-sgd``, where each rank trains
            its own weights. None in other modes.
    """

    def __init__(
        self,
        model: keras.Model,
        collectives: Engine,
        *,
        membership: Membership,
        inputs: FitInputs,
        reducer: GradientReducer,
        steps: Steps,
        whole: FitInputs | None = None,
        begin: Callable[[], None] | None = None,
        begin_session: Callable[[], CheckpointSession] | None = None,
        averaging: WeightAveraging | None = None,
    ) -> None:
        self._model = model
        self._collectives = collectives
        self._membership = membership
        self._reducer = reducer
        self._inputs = inputs
        self._whole = whole or inputs
        self._begin = begin or (lambda: broadcast_model(model, collectives))
        self._own_session = begin_session
        self._averaging = averaging
        self._steps = steps
        self._optimizers = optimizers_of(model)
        self._number = collectives.sections  # identifies the model within the program
        self._fit, self._evaluate, self._predict = model.fit, model.evaluate, model.predict
        self._results = getattr(model, RESULTS)
        self._symbolic_build = getattr(model, SYMBOLIC_BUILD)
        self._input_wait = InputWait()
        self._validation: ShardedInput | None = None
        self._validation_dataset: Any = None
        self._batch_spec: Any = None  # of the data of the running method
        self._epochs: EpochIterator | None = None  # set until Keras' iterator exists
        self._running: EpochIterator | None = None  # set within fit
        self._may_differ = False  # whether a custom train_step may have made ranks differ

    @_collective
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        **unknown: Any,
    ) -> Any:
        """Train on all ranks, as ``keras.Model.fit`` does. ``batch_size`` is per rank."""
        if unknown:
            names = ", ".join(f"{name}=" for name in unknown)
            raise ModelError(
                f"Received {names} for fit() of the model {self._model.name!r}, expected only "
                "Keras' arguments, because hvdtrain.distribute(model) replaces the model's own "
                "fit. Move the additional work of that fit into a callback, or do it before or "
                "after model.fit(…)."
            )
        steps_per_epoch, validation_steps = _capped(steps_per_epoch), _capped(validation_steps)
        self.check_still_distributed()
        self._may_differ = self._averaging is None and overrides(self._model, "train_step")
        self.synchronize_weights()
        listed = list_callbacks(callbacks)
        checkpoint = find_checkpoint_callback(listed)
        session = None if checkpoint is None else self._begin_session(checkpoint, listed)
        if session is not None:
            self._inputs.seed = session.seed(self._inputs.seed)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_validation(
                (x, y, sample_weight), validation_split
            )
        sharded = self._inputs.shard(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            trains=True,
        )
        validation = None
        if validation_data is not None:
            validation = self._whole.shard(
                *keras.utils.unpack_x_y_sample_weight(validation_data),
                batch_size=validation_batch_size or batch_size,
                steps=validation_steps,
            )
        self._build(sharded)
        self._validation = validation
        self._validation_dataset = validation.dataset if validation else None
        try:
            with self._training(sharded, steps_per_epoch, listed, verbose, session) as wrapped:
                if checkpoint is not None:
                    checkpoint.session = session
                own_verbose = verbose if self._membership.is_chief else 0
                if keras.backend.backend() == "jax":
                    # EpochIterator may add a step without data there.
                    wrapped = self._callbacks_of_steps(
                        wrapped,
                        add_progbar=own_verbose != 0,
                        verbose=own_verbose,
                        epochs=epochs,
                        steps=steps_per_epoch or sharded.steps,
                    )
                return self._run_keras(
                    self._fit,
                    sharded.dataset,
                    epochs=epochs,
                    shuffle=False,  # the dataset is shuffled already
                    verbose=own_verbose,
                    callbacks=wrapped,
                    validation_data=self._validation_dataset,
                    initial_epoch=initial_epoch,
                    steps_per_epoch=steps_per_epoch,
                    validation_steps=validation_steps,
                    validation_freq=validation_freq,
                )
        finally:
            report.phase("after fit")
            self._validation = self._validation_dataset = None
            self._epochs = self._running = None
            self._input_wait.release_dataset()
            if checkpoint is not None:
                checkpoint.session = None

    def _callbacks_of_steps(self, callbacks: list[Any], **options: Any) -> Any:
        assert self._running is not None
        return CallbacksOfSteps(callbacks, self._running, model=self._model, **options)

    @contextmanager
    def _training(
        self,
        sharded: ShardedInput,
        steps_per_epoch: int | None,
        callbacks: Sequence[Any],
        verbose: Any,
        session: CheckpointSession | None,
    ) -> Iterator[list[Any]]:
        """Yield the callbacks of ``fit``. The ``with`` block handles lost ranks and signals."""
        membership = self._membership
        epochs = self._epochs = self._running = EpochIterator(
            sharded.reshard(rank=membership.rank, size=membership.size),
            membership,
            steps_per_epoch=steps_per_epoch,
            steps_per_execution=self._model.steps_per_execution,
            accumulates=self._averaging is not None or any(map(accumulates, self._optimizers)),
            input_wait=self._input_wait,
        )
        failover = ChiefFailover(
            callbacks,
            self._collectives,
            membership,
            epochs,
            verbose=verbose,
            broadcast=self._begin,
        )
        on_change: list[ChangeCallback] = [epochs.redistribute, failover.on_change]
        on_change += [entry.on_ranks_lost for entry in callbacks if isinstance(entry, WarmUp)]
        saving = session.running(epochs, self._inputs.seed) if session else nullcontext()
        with (
            saving,
            membership.notifying(on_change),
            self._reducer.tolerate_lost_ranks(),
            self._allowing_nan(callbacks),
        ):
            yield failover.wrapped(self._reducer.contributions, self.synchronize)

    @_collective
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """Evaluate the samples of all ranks, as ``keras.Model.evaluate`` does."""
        self.synchronize()
        steps = _capped(steps)
        if options.get(_WITHIN_FIT) and self._validation is not None:
            sharded = self._validation
        else:
            self.check_still_distributed()
            callbacks = self._own_callbacks(callbacks)
            sharded = self._whole.shard(x, y, sample_weight, batch_size=batch_size, steps=steps)
            self._build(sharded)

        def run(dataset: Any) -> Any:
            if options.get(_WITHIN_FIT):
                # Otherwise Keras would evaluate on the dataset that fit received.
                options[_WITHIN_FIT] = dataset is self._validation_dataset
            return self._run_keras(
                self._evaluate,
                dataset,
                verbose=verbose if self._membership.is_chief else 0,
                steps=steps,
                callbacks=callbacks,
                return_dict=return_dict,
                **options,
            )

        with report.during("validation"):
            return self._whole.run_whole_pass(sharded, run)

    @_collective
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the predictions for all samples, in the order of the input, on every rank."""
        self.synchronize_weights()
        steps = _capped(steps)
        sharded = self._whole.shard(x, batch_size=batch_size, steps=steps)
        rows = self._steps.predicted_rows
        # All ranks leave Keras' loop together, so that none waits long when results are gathered.
        barrier = keras.callbacks.LambdaCallback(
            on_predict_end=lambda logs: self._collectives.barrier(name="end of predict")
        )

        def run(dataset: Any) -> Any:
            rows.clear()
            outputs = self._run_keras(
                self._predict,
                dataset,
                verbose=verbose if self._membership.is_chief else 0,
                steps=steps,
                callbacks=[barrier, *self._own_callbacks(callbacks)],
            )
            interleaved = not self._whole.presharded
            return join_predictions(outputs, rows, self._collectives, interleaved=interleaved)

        with report.during("prediction"):
            return self._whole.run_whole_pass(sharded, run)

    def joint_results(self, logs: Any) -> Any:
        """Return the metrics over the samples of all ranks, after an epoch or an evaluation."""
        model, collectives = self._model, self._collectives
        self._steps.additive.check(collectives)
        with joint_metrics(model, collectives):
            # logs is empty if training was resumed after the last step of an epoch.
            joint = self._results(logs or model.get_metrics_result())
            if joint is not logs:
                # Copy the results, because a user's metric may return its variable, and variables
                # get this rank's values back below.
                return keras.tree.map_structure(result_array, joint)
            if not isinstance(logs, dict):
                return logs
            # A custom train_step returned more than the results of the metrics.
            results = metric_results(model)
        rows = int(self._steps.rows.numpy())
        return join_logs(logs, rows, metric_results(model), results, collectives)

    def symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Run Keras' symbolic build.

        ``fit`` passes its iterator to this method. The ``EpochIterator`` is attached to it here.
        Keras would take a batch from the iterator, which may not be readable again.
        """
        self._symbolic_build(data_batch=data_batch if iterator is None else self._batch_spec)
        if iterator is not None and self._epochs is not None:
            epochs, self._epochs = self._epochs, None  # the next iterator is the validation's
            epochs.attach(iterator)

    def synchronize_weights(self) -> None:
        """Average the weights if each rank trains its own weights. All ranks must call this."""
        members = None if self._averaging is None else self._averaging.end_round()
        if members is not None and self._running is not None:
            self._running.record_applied(members)

    def synchronize(self) -> None:
        """Make weights and layer statistics equal on all ranks. All ranks must call this."""
        self.synchronize_weights()
        more = [] if self._averaging is None else self._averaging.averages_of_weights()
        self._steps.statistics.average(self._collectives, more)
        if self._may_differ:
            self._may_differ = False
            shared = [v for v in self._model.trainable_variables if not self._reducer.is_local(v)]
            check_equal(self._model, shared, self._collectives)

    def check_still_distributed(self) -> None:
        """Check that the model was not compiled after it was distributed.

        Raises:
            ModelError: If the model was compiled again.
        """
        optimizers = optimizers_of(self._model)
        same = [*map(id, optimizers)] == [*map(id, self._optimizers)]
        if not same or not all(map(is_distributed, optimizers)):
            raise ModelError(
                f"The model {self._model.name!r} was compiled after hvdtrain.distribute(model), so "
                "its optimizer would not average gradients. Call hvdtrain.distribute(model) again "
                "after model.compile(…)."
            )

    def _begin_session(self, checkpoint: Checkpoint, callbacks: list[Any]) -> CheckpointSession:
        if self._own_session is not None:
            return self._own_session()
        return begin_session(
            checkpoint.options,
            self._model,
            self._collectives,
            self._membership,
            callbacks,
            self._steps.samples,
            averaging=self._averaging,
            feedback=self._reducer.feedback,
            join=self.synchronize_weights,
        )

    @contextmanager
    def _allowing_nan(self, callbacks: Sequence[Any]) -> Iterator[None]:
        """Accept NaN and infinity in gradients within the block if ``TerminateOnNaN`` is used."""
        if not stops_at_nan(callbacks):
            yield
            return
        reset_functions(self._model)
        try:
            with self._reducer.allowing_non_finite():
                yield
        finally:
            reset_functions(self._model)

    def _own_callbacks(self, callbacks: Any) -> list[Any]:
        """Return the user's callbacks of ``evaluate`` or ``predict`` that run on this rank."""
        listed = list_callbacks(callbacks)
        chief = self._membership.is_chief
        own = [entry for entry in listed if chief or not isinstance(entry, CHIEF_ONLY)]
        return [*own, StopTogether(self._collectives, listed)]

    def _build(self, sharded: ShardedInput) -> None:
        """Build metrics and losses on every rank before the first step."""
        if sharded.joint_rows_known != self._steps.joint_rows_known:
            self._steps.joint_rows_known = sharded.joint_rows_known
            reset_functions(self._model)
        self._batch_spec = keras.tree.map_structure(
            lambda spec: None if is_absent(spec) else spec, sharded.dataset.element_spec.batch
        )
        try:
            if overrides(self._model, "call") or not BUILDS_IN_STEPS:
                build_symbolically(self._model, self._batch_spec)
        except Exception:
            # A custom train_step needn't call the model or compute metrics as Keras does.
            if not overrides(self._model, "train_step"):
                raise
        self._steps.additive.reset()

    def _run_keras(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method of Keras. It raises errors of hvdtrain as themselves."""
        with self._steps.own_errors():
            return method(*args, **options)
