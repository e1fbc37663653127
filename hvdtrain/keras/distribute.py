"""``hvdtrain.distribute(model)``: a compiled Keras model trains on all ranks together."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.collectives.base import Collectives
from hvdtrain.errors import ModelError
from hvdtrain.keras.batch_normalization import (
    RowFlag,
    synchronize_batch_normalization,
    synchronized_layers,
)
from hvdtrain.keras.callbacks import wrap_callbacks
from hvdtrain.keras.data import ShardedInput, shard_input
from hvdtrain.keras.metrics import joint_metrics
from hvdtrain.keras.optimizer import distribute_optimizer, is_distributed
from hvdtrain.keras.predictions import join_predictions
from hvdtrain.keras.replicas import (
    average_statistics,
    broadcast_model,
    check_same_model,
    reseed_by_rank,
)
from hvdtrain.keras.steps import Steps, has_own_train_step
from hvdtrain.tensorflow.reducer import GradientReducer

__all__ = ["DistributedOptimizer", "distribute", "scale_learning_rate"]

_MARK = "_hvdtrain_distribution"


def distribute(model: keras.Model, *, presharded: bool = False) -> keras.Model:
    """Let ``fit``, ``evaluate`` and ``predict`` of ``model`` work on all ranks together.

    Training on N ranks with ``batch_size=B`` equals training one process on batches of N * B:
    weights, optimizer state and metrics start as the chief's; the input is shared out; gradients
    are averaged, weighted by samples; metrics and losses of an epoch are those of all samples;
    every rank runs the same number of steps. Progress and files come from the chief alone, dropout
    differs by rank, and the model is saved as if hvdtrain had never been there.

    Args:
        model: Compiled and built. Compile again, or change what is trainable, and it must be
            distributed again.
        presharded: Each rank passes its own part of the data, as Horovod's users do, instead of
            the whole.

    Returns:
        The same model.

    Raises:
        ModelError: The model is not compiled or not built, or can't be distributed.
        MismatchError: Ranks have different models; raised on all of them.
    """
    collectives = world.collectives()
    _check_ready(model)
    if collectives.size > 1:
        check_same_model(model, collectives)
        _Distribution(model, collectives, presharded).install()
    return model


def DistributedOptimizer(optimizer: Any) -> Any:
    """Let an optimizer average gradients over all ranks before it applies them.

    For training loops that call ``optimizer.apply``; ``distribute`` does it for ``fit``.

    Returns:
        The same optimizer, which is saved and loaded as the plain one.
    """
    collectives = world.collectives()
    if collectives.size == 1:
        return optimizer
    reducer = GradientReducer(collectives, world.settings().non_finite)
    return distribute_optimizer(optimizer, reducer)


def scale_learning_rate(rate: float) -> float:
    """``rate`` times the number of ranks, as the joint batch is that many times larger.

    The linear scaling rule of Goyal et al. (2017), "Accurate, Large Minibatch SGD".
    """
    return rate * world.size()


def _check_ready(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"hvdtrain.distribute takes a Keras 3 model, received {type(model).__name__}."
        )
    if not model.compiled:
        raise ModelError(
            f"The model {model.name!r} is not compiled. Call model.compile(optimizer=…, loss=…) "
            "before hvdtrain.distribute(model)."
        )
    if not model.built or not model.variables:
        raise ModelError(
            f"The model {model.name!r} is not built: it has no variables that could be broadcast. "
            "Begin it with keras.Input(shape=…), or call model.build(input_shape) or model(x[:1]) "
            "before hvdtrain.distribute(model)."
        )
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)


class _Distribution:
    """What ``distribute`` puts into one model; the model's own methods stay underneath."""

    def __init__(self, model: keras.Model, collectives: Collectives, presharded: bool) -> None:
        self._model = model
        self._collectives = collectives
        self._presharded = presharded
        self._chief = collectives.rank == 0
        self._reducer = GradientReducer(collectives, world.settings().non_finite)
        self._validation: ShardedInput | None = None
        self._seed = 0
        self._noticed: set[str] = set()

    def install(self) -> None:
        """Replace the methods of the model's instance; its class stays as it is."""
        model, collectives = self._model, self._collectives
        self._remove_earlier()
        self._seed = collectives.broadcast_object(random.getrandbits(31), name="seed")
        flag = RowFlag()
        jit = self._choose_jit()
        distribute_optimizer(model.optimizer, self._reducer)
        self._optimizer = model.optimizer
        for layer in synchronized_layers(model):
            synchronize_batch_normalization(layer, collectives, flag)
        self._steps = Steps(model, self._reducer, jit, flag)
        self._fit, self._evaluate, self._predict = model.fit, model.evaluate, model.predict
        self._results = model._get_metrics_result_or_logs
        self._put("train_step", self._steps.train)
        self._put("test_step", self._steps.test)
        self._put("fit", self.fit)
        self._put("evaluate", self.evaluate)
        self._put("predict", self.predict)
        self._put("_get_metrics_result_or_logs", self._joint_results)
        self._put(_MARK, self)
        self._forget_functions()
        broadcast_model(model, collectives)
        reseed_by_rank(model, collectives)

    def _put(self, name: str, value: Any) -> None:
        # Past Keras' __setattr__, which tracks what is set as part of the model.
        object.__setattr__(self._model, name, value)

    def _remove_earlier(self) -> None:
        if _MARK in vars(self._model):
            for name in (
                "train_step",
                "test_step",
                "fit",
                "evaluate",
                "predict",
                _MARK,
                "_get_metrics_result_or_logs",
            ):
                vars(self._model).pop(name, None)

    def _forget_functions(self) -> None:
        """Drop graphs that were traced for other steps."""
        self._model.train_function = None
        self._model.test_function = None
        self._model.predict_function = None

    def _choose_jit(self) -> bool:
        """Take compilation away from Keras, which would compile the communication as well."""
        model = self._model
        jit = bool(model.jit_compile)
        model.jit_compile = False
        if jit and synchronized_layers(model):
            self._notice(
                "BatchNormalization(synchronized=True) talks to other ranks within the forward "
                "pass, which XLA can't; this model runs without jit_compile."
            )
            return False
        if jit and has_own_train_step(model):
            self._notice(
                "This model has a train_step of its own, which can't be split around the "
                "communication; it runs without jit_compile."
            )
            return False
        return jit

    def _notice(self, text: str | None) -> None:
        if text and self._chief and text not in self._noticed:
            self._noticed.add(text)
            print(f"hvdtrain: {text}", file=sys.stderr, flush=True)

    # The methods that take the place of the model's own.

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
    ) -> Any:
        """``keras.Model.fit`` on all ranks; ``batch_size`` is per rank."""
        self._check_still_ours()
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = _split((x, y, sample_weight), validation_split)
        sharded = self._shard(
            x,
            y,
            sample_weight,
            batch_size,
            steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        validation = None
        if validation_data is not None:
            val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
            size = validation_batch_size or batch_size
            validation = self._shard(val_x, val_y, val_weight, size, validation_steps)
        self._prepare(sharded)
        self._validation = validation
        try:
            return self._guard(
                self._fit,
                sharded.dataset,
                epochs=epochs,
                shuffle=False,  # the dataset is in this epoch's order already
                verbose=verbose if self._chief else 0,
                callbacks=wrap_callbacks(callbacks, self._collectives, sharded, self._broadcast),
                validation_data=validation.dataset if validation else None,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
            )
        finally:
            self._validation = None

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
        average_statistics(self._model, self._collectives)
        within_fit = options.get("_use_cached_eval_dataset", False)
        if within_fit and self._validation is not None:
            sharded = self._validation
        else:
            self._check_still_ours()
            sharded = self._shard(x, y, sample_weight, batch_size, steps)
            self._prepare(sharded)
        sharded.on_epoch_begin(0)
        result = self._guard(
            self._evaluate,
            sharded.dataset,
            verbose=verbose if self._chief else 0,
            steps=steps,
            callbacks=callbacks,
            return_dict=return_dict,
            **options,
        )
        sharded.on_epoch_end()
        return result

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """``keras.Model.predict``: every rank gets the whole result, in the order of the input."""
        sharded = self._shard(x, None, None, batch_size, steps)
        self._put("predict_step", self._steps.predict)
        self._model.predict_function = None
        sharded.on_epoch_begin(0)
        try:
            mine = self._guard(
                self._predict,
                sharded.dataset,
                verbose=verbose if self._chief else 0,
                steps=steps,
                callbacks=callbacks,
            )
        finally:
            vars(self._model).pop("predict_step", None)
            self._model.predict_function = None
        sharded.on_epoch_end()
        return join_predictions(mine, self._collectives, interleaved=not self._presharded)

    def _joint_results(self, logs: Any) -> Any:
        """Metrics of all ranks, at the end of an epoch or of an evaluation."""
        with joint_metrics(self._model, self._collectives):
            joint = self._results(logs)
        if joint is not logs or not isinstance(logs, dict):
            return joint
        # The user's own train_step returned other values than the metrics: average those.
        values = np.array([float(value) for value in logs.values()], np.float64)
        averages = self._collectives.allreduce(values, "average", name="logs")
        return dict(zip(logs, (float(value) for value in averages)))

    # What they share.

    def _shard(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        steps: int | None,
        *,
        shuffle: Any = False,
        class_weight: Any = None,
    ) -> ShardedInput:
        sharded = shard_input(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            steps=steps,
            rank=self._collectives.rank,
            size=self._collectives.size,
            seed=self._seed,
            collectives=self._collectives,
            presharded=self._presharded,
        )
        self._notice(sharded.notice)
        return sharded

    def _prepare(self, sharded: ShardedInput) -> None:
        """Build metrics and losses before the first step: every rank must have all of them."""
        if sharded.joint_rows_known != self._steps.joint_rows_known:
            self._steps.joint_rows_known = sharded.joint_rows_known
            self._forget_functions()
        batch_spec = sharded.dataset.element_spec[0]
        self._model._symbolic_build(data_batch=batch_spec)

    def _broadcast(self) -> None:
        broadcast_model(self._model, self._collectives)

    def _check_still_ours(self) -> None:
        optimizer = self._model.optimizer
        if optimizer is not self._optimizer or not is_distributed(optimizer):
            raise ModelError(
                f"The model {self._model.name!r} was compiled after hvdtrain.distribute(model), so "
                "that its optimizer would average nothing. Call hvdtrain.distribute(model) again "
                "after model.compile(…)."
            )

    def _guard(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a method of Keras; show errors between ranks as they were, not as TensorFlow's."""
        try:
            return method(*args, **options)
        except tf.errors.OpError:
            error, self._reducer.error = self._reducer.error, None
            if error is None:
                raise
            raise error from None


def _split(arrays: Any, validation_split: float) -> Any:
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=validation_split)
