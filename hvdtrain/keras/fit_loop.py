"""``fit``, ``evaluate`` and ``predict`` as a distributed model has them, around Keras' own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.callback_list import (
    CHIEF_ONLY,
    ChiefFailover,
    MeetAtEnd,
    StopTogether,
    list_callbacks,
    stops_at_nan,
    wrap_callbacks,
)
from hvdtrain.keras.data import ShardedInput
from hvdtrain.keras.data.batch_structure import is_absent
from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.fit_inputs import FitInputs, InputWait
from hvdtrain.keras.joint_results import (
    join_logs,
    join_predictions,
    joint_metrics,
    noting_rows,
    results_of_metrics,
)
from hvdtrain.keras.learning_rate import WarmUp
from hvdtrain.keras.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.keras.membership import Follower, Membership
from hvdtrain.keras.model_parts import optimizers_of, overrides
from hvdtrain.keras.model_steps import ModelSteps
from hvdtrain.keras.model_sync import broadcast_model, check_alike
from hvdtrain.keras.optimizer_patch import accumulates, is_distributed
from hvdtrain.keras.saving.checkpoint_callback import begin_session, find_checkpoint_callback
from hvdtrain.keras.saving.checkpoint_session import CheckpointSession
from hvdtrain.monitor import report
from hvdtrain.private_api.keras import (
    RESULTS,
    SYMBOLIC_BUILD,
    build_symbolically,
    split_validation,
)

__all__ = ["FitLoop", "reset_functions"]


# The argument by which Keras' fit marks its own calls of evaluate.
_WITHIN_FIT = "_use_cached_eval_dataset"


def reset_functions(model: keras.Model) -> None:
    """Drop graphs that were traced for other steps."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def _refuse_own(model: keras.Model, own: Mapping[str, Any]) -> None:
    """Refuse arguments that a ``fit`` of the model's own has beyond Keras'."""
    if own:
        names = ", ".join(f"{name}=" for name in own)
        raise ModelError(
            f"Received {names} for fit() of the model {model.name!r}; expected Keras' arguments, "
            "as hvdtrain.distribute(model) puts a fit of all ranks in the place of its own. Do "
            "what that adds around model.fit(…), or in a callback."
        )


# Arguments of fit that decide how long it takes, and are not part of the input.
_LENGTH = ("epochs", "initial_epoch", "validation_freq")


def _together(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let all ranks begin and leave a method of ``FitLoop`` together, even by an error."""
    name, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method)
    def call(self: FitLoop, *args: Any, **options: Any) -> Any:
        if options.get(_WITHIN_FIT):
            return method(self, *args, **options)
        given: Mapping[str, Any] = {}
        with suppress(TypeError):
            given = signature.bind(self, *args, **options).arguments
        length = [f"{key}={given[key]}" for key in _LENGTH if key in given]
        with self._collectives.section(name, (f"model {self._number}", *length)):
            return method(self, *args, **options)

    return call


def _capped(steps: int | None) -> int | None:
    """Limit the steps of a loop as Keras does: to those of ``set_max_steps_per_epoch``."""
    limit: int | None = keras.config.max_steps_per_epoch()
    return min(steps or limit, limit) if limit else steps


class FitLoop:
    """The methods that take the place of a model's own, such as ``fit``; those stay underneath.

    Args:
        reducer: Averages the gradients; keeps the errors that TensorFlow hides.
        whole: Shares out what is evaluated or predicted; as ``inputs`` if not given.
        begin: Gives all ranks the chief's state as training begins.
        begin_session: Takes the place of the function of this name.
        averaging: Averages weights, where each rank trains by itself meanwhile.
    """

    def __init__(
        self,
        model: keras.Model,
        collectives: Engine,
        *,
        membership: Membership,
        inputs: FitInputs,
        reducer: GradientReducer,
        steps: ModelSteps,
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
        # Tells models of one program apart.
        self._number = collectives.sections
        self._fit, self._evaluate, self._predict = model.fit, model.evaluate, model.predict
        self._make_predict_function = model.make_predict_function
        self._results = getattr(model, RESULTS)
        self._symbolic_build = getattr(model, SYMBOLIC_BUILD)
        self._input_wait = InputWait()
        self._validation: ShardedInput | None = None
        self._validation_dataset: tf.data.Dataset | None = None
        self._epochs: EpochIterator | None = None
        self._running: EpochIterator | None = None  # within fit
        self._may_differ = False  # weights of ranks, as a step of the user's may have updated them

    @_together
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
        **own: Any,
    ) -> Any:
        """``keras.Model.fit`` on all ranks; ``batch_size`` is per rank."""
        _refuse_own(self._model, own)
        steps_per_epoch = _capped(steps_per_epoch)
        validation_steps = _capped(validation_steps)
        self.check_still_distributed()
        self._may_differ = self._averaging is None and overrides(self._model, "train_step")
        self.join_weights()
        listed = list_callbacks(callbacks)
        checkpoint = find_checkpoint_callback(listed)
        session = None
        if checkpoint is not None:
            session = (
                self._own_session()
                if self._own_session is not None
                else begin_session(
                    checkpoint.options,
                    self._model,
                    self._collectives,
                    self._membership,
                    listed,
                    self._steps.samples,
                    averaging=self._averaging,
                    feedback=self._reducer.feedback,
                    join=self.join_weights,
                )
            )
            self._inputs.seed = session.seed(self._inputs.seed)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_validation(
                (x, y, sample_weight), validation_split
            )
        sharded = self._inputs.share(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            trains=True,
        )
        self._inputs.check_repeatable(sharded)
        validation = None
        if validation_data is not None:
            validation = self._whole.share(
                *keras.utils.unpack_x_y_sample_weight(validation_data),
                batch_size=validation_batch_size or batch_size,
                steps=validation_steps,
            )
        self._prepare(sharded)
        epochs_ = self._epochs = self._running = EpochIterator(
            sharded.reshard(rank=self._membership.rank, size=self._membership.size),
            self._membership,
            steps_per_epoch=steps_per_epoch,
            steps_per_execution=self._model.steps_per_execution,
            accumulates=self._averaging is not None or any(map(accumulates, self._optimizers)),
            input_wait=self._input_wait,
        )
        self._validation = validation
        self._validation_dataset = validation.dataset if validation else None
        failover = ChiefFailover(listed, self._collectives, self._membership, verbose)
        followers: list[Follower] = [epochs_.redistribute, failover.take_over]
        followers += [entry.follow for entry in listed if isinstance(entry, WarmUp)]
        saving = session.running(epochs_, self._inputs.seed) if session else nullcontext()
        try:
            if checkpoint is not None:
                checkpoint.session = session
            with (
                saving,
                self._membership.followed_by(followers),
                self._reducer.tolerate_lost_ranks(),
                self._ending_at_nan(listed),
            ):
                return self._guard(
                    self._fit,
                    sharded.dataset,
                    epochs=epochs,
                    shuffle=False,  # the dataset is in this epoch's order already
                    verbose=verbose if self._membership.is_chief else 0,
                    callbacks=wrap_callbacks(
                        failover,
                        self._collectives,
                        self._membership,
                        epochs_,
                        self._reducer.contributions,
                        broadcast=self._begin,
                        join=self.join,
                    ),
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
            self._input_wait.forget_dataset()
            if checkpoint is not None:
                checkpoint.session = None

    @_together
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
        """``keras.Model.evaluate`` over the samples of all ranks."""
        self.join()
        steps = _capped(steps)
        if options.get(_WITHIN_FIT) and self._validation is not None:
            sharded = self._validation
        else:
            self.check_still_distributed()
            callbacks = self._callbacks(callbacks)
            sharded = self._whole.share(x, y, sample_weight, batch_size=batch_size, steps=steps)
            self._prepare(sharded)

        def run(dataset: tf.data.Dataset) -> Any:
            if options.get(_WITHIN_FIT):
                # Keras would evaluate on the dataset that fit was given.
                options[_WITHIN_FIT] = dataset is self._validation_dataset
            return self._guard(
                self._evaluate,
                dataset,
                verbose=verbose if self._membership.is_chief else 0,
                steps=steps,
                callbacks=callbacks,
                return_dict=return_dict,
                **options,
            )

        with report.during("validation"):
            return self._whole.whole_pass(sharded, run)

    @_together
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """``keras.Model.predict``: every rank gets the whole result, in the order of the input."""
        self.join_weights()
        steps = _capped(steps)
        sharded = self._whole.share(x, batch_size=batch_size, steps=steps)

        def run(dataset: tf.data.Dataset) -> Any:
            self._steps.predicted_rows.clear()
            mine = self._guard(
                self._predict,
                dataset,
                verbose=verbose if self._membership.is_chief else 0,
                steps=steps,
                callbacks=[MeetAtEnd(self._collectives), *self._callbacks(callbacks)],
            )
            return join_predictions(
                mine,
                self._steps.predicted_rows,
                self._collectives,
                interleaved=not self._whole.presharded,
            )

        with report.during("prediction"):
            return self._whole.whole_pass(sharded, run)

    def make_predict_function(self, force: bool = False) -> None:
        """Make Keras' predict function, but let callbacks see the model's outputs and no more."""
        model = self._model
        if model.predict_function is None or force:
            self._make_predict_function(force)
            model.predict_function = noting_rows(model.predict_function, self._steps.predicted_rows)

    def joint_results(self, logs: Any) -> Any:
        """Metrics of all ranks, at the end of an epoch or of an evaluation."""
        model, collectives = self._model, self._collectives
        self._steps.additive.check(collectives)
        with joint_metrics(model, collectives):
            # Resumed after the last step of an epoch, there was no step that could return some.
            joint = self._results(logs or model.get_metrics_result())
            if joint is not logs:
                # A metric of the user's own may return its variable, which is about to change; or
                # a tensor that it holds, which Keras lets pass though its graph has ended.
                return keras.tree.map_structure(
                    lambda leaf: leaf if tf.is_symbolic_tensor(leaf) else tf.identity(leaf), joint
                )
            if not isinstance(logs, dict):
                return logs
            # The user's own step returned something else than what the metrics say.
            results = results_of_metrics(model)
        rows = int(self._steps.rows.numpy())
        return join_logs(logs, rows, results_of_metrics(model), results, collectives)

    def adopt(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Run Keras' symbolic build; take over the iterator over an epoch that ``fit`` shows it."""
        self._symbolic_build(iterator=iterator, data_batch=data_batch)
        if iterator is not None and self._epochs is not None:
            epochs, self._epochs = self._epochs, None  # not the validation's
            epochs.take_over(iterator)

    # What they share.

    def join_weights(self) -> None:
        """Let all ranks have the same weights, where each trains by itself; collective."""
        members = None if self._averaging is None else self._averaging.end_round()
        if members is not None and self._running is not None:
            self._running.note_joined(members)

    def join(self) -> None:
        """Let the model be the same on all ranks, for others to see; collective."""
        self.join_weights()
        more = [] if self._averaging is None else self._averaging.averages_of_weights()
        self._steps.statistics.average(self._collectives, more)
        if self._may_differ:
            self._may_differ = False
            shared = [v for v in self._model.trainable_variables if not self._reducer.is_local(v)]
            check_alike(self._model, shared, self._collectives)

    @contextmanager
    def _ending_at_nan(self, callbacks: Sequence[Any]) -> Iterator[None]:
        """Within the block leave NaN to ``TerminateOnNaN``, if it is one of the callbacks."""
        if not stops_at_nan(callbacks):
            yield
            return
        reset_functions(self._model)
        try:
            with self._reducer.allowing_non_finite():
                yield
        finally:
            reset_functions(self._model)

    def _callbacks(self, callbacks: Any) -> list[Any]:
        """Return the user's callbacks of ``evaluate`` or ``predict`` that this rank runs."""
        listed = list_callbacks(callbacks)
        chief = self._membership.is_chief
        mine = [entry for entry in listed if chief or not isinstance(entry, CHIEF_ONLY)]
        return [*mine, StopTogether(self._collectives, listed)]

    def _prepare(self, sharded: ShardedInput) -> None:
        """Build metrics and losses before the first step: every rank must have all of them."""
        if sharded.joint_rows_known != self._steps.joint_rows_known:
            self._steps.joint_rows_known = sharded.joint_rows_known
            reset_functions(self._model)
        batch_spec = keras.tree.map_structure(
            lambda spec: None if is_absent(spec) else spec, sharded.dataset.element_spec.batch
        )
        try:
            if overrides(self._model, "call"):
                build_symbolically(self._model, batch_spec)
        except Exception:
            # A step of the user's own need not call the model, nor compute metrics, as Keras would.
            if not overrides(self._model, "train_step"):
                raise
        self._steps.additive.reset()

    def check_still_distributed(self) -> None:
        """Check that the model was not compiled since it was distributed.

        Raises:
            ModelError: It was.
        """
        optimizers = optimizers_of(self._model)
        same = [*map(id, optimizers)] == [*map(id, self._optimizers)]
        if not same or not all(map(is_distributed, optimizers)):
            raise ModelError(
                f"The model {self._model.name!r} was compiled after hvdtrain.distribute(model), so "
                "that its optimizer would average nothing. Call hvdtrain.distribute(model) again "
                "after model.compile(…)."
            )

    def _guard(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a method of Keras; show errors between ranks as they were, not as TensorFlow's."""
        try:
            return method(*args, **options)
        except tf.errors.OpError as raised:
            error = self._reducer.take_error(raised)
            if error is None:
                raise
            raise error from None
