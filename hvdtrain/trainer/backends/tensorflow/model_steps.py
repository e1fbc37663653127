"""The steps that Keras' loops run on each batch of a rank.

Most collectives of a step are called here. ``OneDevice`` or ``Towers`` runs the model itself on
this rank's devices. That part may be compiled with XLA, which does not support collectives.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain import world
from hvdtrain.frameworks.tensorflow.graph_order import NoShadowError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import compiled_loss
from hvdtrain.trainer.additive_metrics import AdditiveMetrics
from hvdtrain.trainer.backends.step_checks import FixedVariables, check_sums
from hvdtrain.trainer.backends.tensorflow.empty_batch import if_rows
from hvdtrain.trainer.backends.tensorflow.graph_random import GraphRankGenerator, random_of_step
from hvdtrain.trainer.backends.tensorflow.one_device import BatchWeight, OneDevice, rows_of
from hvdtrain.trainer.backends.tensorflow.towers import Towers
from hvdtrain.trainer.data import Share
from hvdtrain.trainer.loss_weights import LossWeights, are_sums, has_vector_losses, ratio
from hvdtrain.trainer.model_parts import optimizers_of, overrides
from hvdtrain.trainer.moving_statistics import MovingStatistics
from hvdtrain.trainer.optimizer_patch import weighting

__all__ = ["Compute", "ModelSteps"]

Compute = OneDevice | Towers


class Predicted(NamedTuple):
    """The result of a prediction step on this rank's share of the data."""

    outputs: Any  # the outputs of the model
    # Two numbers, int64 of shape (1, 2). The first is the number of rows that count. The second is
    # the number of rows of the batch. The first is either equal to the second, or 0.
    rows: Any


class ModelSteps:
    """The ``train_step``, ``test_step`` and ``predict_step`` of one model.

    Args:
        compute: Runs the model on this rank's devices.
        weights: Computes the weight of this rank's loss. The default suits gradients that
            ``reducer`` averages.
        synchronized: Layers that normalize with the mean and variance over the batches of all
            ranks.
    """

    def __init__(
        self,
        model: keras.Model,
        reducer: GradientReducer,
        compute: Compute,
        weights: LossWeights | None = None,
        *,
        synchronized: Sequence[Any] = (),
    ) -> None:
        self._model = model
        self._weights = weights or LossWeights(reducer)
        self._elastic = reducer.collectives.survives_losses
        self._contributions = reducer.contributions
        self.own_errors = reducer.raising_own_errors
        self._compute = compute
        compute.joint_loss = self._weights.joint_loss
        self.step_rows: tf.Tensor | None = None
        """The number of rows that count in the current training step; None between steps."""
        self.step_weight: tf.Tensor | None = None
        """The factor of the gradients in the current step of an own ``train_step``."""
        self.statistics = MovingStatistics(model, synchronized)
        self.additive = AdditiveMetrics(model)
        self._member = world.collectives().member
        self._variables = FixedVariables(model)
        self._plain_train_step = model.train_step
        self._make_predict_function = model.make_predict_function
        self.joint_rows_known = False
        """Whether ``Share.joint_rows`` is set, so that ranks needn't exchange their rows."""
        self.predicted_rows: list[Any] = []
        """``Predicted.rows`` of each step of a prediction."""
        self.samples = self._counter("samples")
        """The number of samples that this rank has trained on."""
        self.ran = self._counter("ran")
        """The number of training steps in this process, including the current one."""
        self.rows = self._counter("rows")
        """The number of samples that counted in the last training or test step."""

    @staticmethod
    def _counter(name: str) -> keras.Variable:
        return keras.Variable(0, dtype="int64", trainable=False, name=name)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods to replace on the model, by name."""
        model = self._model
        return {
            "train_step": self.train,
            "test_step": self.test,
            "predict_step": self.predict,
            "make_train_function": _without_jit(model, model.make_train_function),
            "make_test_function": _without_jit(model, model.make_test_function),
            "make_predict_function": _without_jit(model, self._make_recording_function),
        }

    def _make_recording_function(self, force: bool = False) -> None:
        """Make a predict function that passes only the model's outputs to callbacks."""
        model = self._model
        if model.predict_function is None or force:
            self._make_predict_function(force)
            model.predict_function = _recording_rows(model.predict_function, self.predicted_rows)

    def train(self, data: Any) -> Any:
        """Run ``train_step``.

        ``data`` is either an element of a sharded dataset, or a batch that was passed to
        ``train_on_batch``.
        """
        self._variables.check()
        if self._elastic and isinstance(data, Share):
            tf.numpy_function(self._contributions.begin_step, [], [])
        share = self._share_of(data)
        counts, row_weight = self._counts(share)
        self.step_rows = share.rows
        self.rows.assign(tf.cast(share.rows, tf.int64))
        self.samples.assign_add(self.rows.value)
        self.ran.assign_add(1)
        try:
            with self.additive.trying(), random_of_step(self._member) as generator:
                if overrides(self._model, "train_step"):
                    with self._weighting_rows(share.rows, row_weight):
                        return self._train_own(share, counts)
                return self._train_plain(share, counts, row_weight, generator)
        finally:
            self.step_rows = self.step_weight = None

    def test(self, data: Any) -> Any:
        """Run ``test_step``. If no rows of the batch count, the metrics don't change."""
        share = self._share_of(data)
        self.rows.assign(tf.cast(share.rows, tf.int64))
        within = functools.partial(_metrics_by_rows, self._model, share.rows)
        with self.additive.trying():
            if isinstance(data, Share):
                return self._compute.test(within, share.batch, share.rows, share.joint_rows)
            # No collectives for test_on_batch, which a single rank may call.
            return self._compute.test(within, share.batch, None, None)

    def predict(self, data: Any) -> Any:
        """Run ``predict_step``, and return ``Predicted`` for an element of a sharded dataset."""
        if not isinstance(data, Share):
            return self._compute.predict(data)
        outputs = self._compute.predict(data.batch)
        counts = tf.stack([tf.cast(data.rows, tf.int64), tf.cast(rows_of(data.batch), tf.int64)])
        return Predicted(outputs, counts[tf.newaxis])

    @contextmanager
    def _weighting_rows(self, rows: tf.Tensor, weight: tf.Tensor) -> Iterator[None]:
        """Weight metrics and layer statistics by the number of rows within the ``with`` block."""
        with (
            _metrics_by_rows(self._model, rows),
            self.statistics.weighted_by(weight, select=self._compute.jit),
        ):
            yield

    def _train_plain(
        self,
        share: Share,
        counts: BatchWeight,
        row_weight: tf.Tensor,
        generator: GraphRankGenerator,
    ) -> Any:
        """Train like ``keras.Model.train_step``, with a loss weighted by this rank's rows."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(share.batch)

        def differentiate() -> Any:
            within = functools.partial(self._weighting_rows, share.rows, row_weight)
            gradients, *others = self._compute.differentiate(within, x, y, sample_weight, counts)
            return [_parts(g, v) for g, v in zip(gradients, model.trainable_variables)], *others

        try:
            parts, terms, metrics = if_rows(
                share.rows,
                differentiate,
                self.statistics.skip,
                generator,
                model.get_metrics_result,
            )
            factor = None
            # Keep the keys of ``metrics``, because a custom compute_metrics may add values that
            # get_metrics_result doesn't return.
            results = model.get_metrics_result()
            metrics = {name: results.get(name, value) for name, value in metrics.items()}
        except NoShadowError:
            # Run the model even on a batch that doesn't count.
            parts, terms, metrics = differentiate()
            factor = tf.cast(share.rows > 0, tf.float32)
        gradients = [_gradient(p, v) for p, v in zip(parts, model.trainable_variables)]
        terms = () if model.losses else terms
        how = self._weights.weighting(are_sums(model), counts.weight, factor, terms)
        if gradients:
            with weighting([model.optimizer], how, self._compute.jit):
                self._apply(gradients)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=1)
        return metrics

    def _apply(self, gradients: Sequence[Any]) -> None:
        self._model.optimizer.apply_gradients(zip(gradients, self._model.trainable_variables))

    def _train_own(self, share: Share, counts: BatchWeight) -> Any:
        """Run a ``train_step`` that the model overrides. The optimizers weight the gradients."""
        rows, joint_rows, weight = counts
        if has_vector_losses(self._model):
            weight *= ratio(joint_rows, rows)
        how = self._weights.weighting(are_sums(self._model), weight, weight, ())
        self.step_weight = weight
        with (
            weighting(optimizers_of(self._model), how, self._compute.jit),
            self._weights.joint_loss(rows, joint_rows, "train"),
        ):
            return self._plain_train_step(share.batch)

    def _counts(self, share: Share) -> tuple[BatchWeight, tf.Tensor]:
        """Return two weights of this rank's batch: for its loss, and for a mean over rows."""
        sums = are_sums(self._model)
        if self._elastic:
            check_sums(self._model)
        joint_rows = self._weights.joint_rows(share.rows, share.joint_rows, sums)
        row_weight = self._weights.weight(share.rows, joint_rows, sums=False)
        # This call comes last, because it sets the step's contribution to an average of weights.
        weight = self._weights.weight(share.rows, joint_rows, sums)
        return BatchWeight(share.rows, joint_rows, weight), row_weight

    def _share_of(self, data: Any) -> Share:
        if isinstance(data, Share):
            return data if self.joint_rows_known else data._replace(joint_rows=None)
        # This rank's own batch, from train_on_batch or test_on_batch.
        return Share(data, rows_of(data), None)


def _recording_rows(function: Callable[[Any], Any], rows: list[Any]) -> Callable[[Any], Any]:
    """Return a predict function that returns only the outputs, and records the numbers of rows.

    The function appends ``Predicted.rows`` of each step to the list ``rows``. If the function
    returned these numbers too, Keras would pass them to callbacks and concatenate them like
    outputs.
    """

    def predict(data: Any) -> Any:
        result = function(data)
        if not isinstance(result, Predicted):
            return result
        rows.append(result.rows)
        return result.outputs

    return predict


def _without_jit(model: keras.Model, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``make`` without ``jit_compile``, because XLA can't compile collectives."""

    @functools.wraps(make)
    def make_uncompiled(*args: Any, **options: Any) -> Any:
        jit, model.jit_compile = model.jit_compile, False
        try:
            return make(*args, **options)
        finally:
            model.jit_compile = jit

    return make_uncompiled


def _parts(gradient: Any, variable: Any) -> Any:
    """Return the tensors of a gradient, with the static shape of the variable if it is dense."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    if gradient is not None:
        gradient.set_shape(variable.shape)
    return gradient


def _gradient(parts: Any, variable: Any) -> Any:
    """Return the gradient from the tensors that ``_parts`` returned."""
    if isinstance(parts, tuple):
        return tf.IndexedSlices(*parts, tf.constant(list(variable.shape)))
    return parts


@contextmanager
def _metrics_by_rows(model: keras.Model, rows: tf.Tensor) -> Iterator[None]:
    """Weight the metrics of a step within the ``with`` block by the number of rows.

    If the batch has no rows that count, the metrics don't change. In models with several outputs,
    each output has a metric for its loss. If Keras doesn't know the batch size, it gives each batch
    the weight 1 in these metrics. Here, each batch gets its number of rows as weight.
    """
    variables = list(model.metrics_variables)
    before = {id(variable): tf.identity(variable.value) for variable in variables}
    yield
    for mean in getattr(compiled_loss(model), "metrics", []):
        if id(mean.total) in before and id(mean.count) in before:
            _weight_by_rows(mean, rows, before[id(mean.total)], before[id(mean.count)])
    for variable in variables:
        variable.assign(tf.where(rows > 0, variable.value, before[id(variable)]))


def _weight_by_rows(mean: Any, rows: tf.Tensor, total: tf.Tensor, count: tf.Tensor) -> None:
    weight = tf.cast(rows, mean.total.dtype)
    added = tf.cast(mean.count.value - count, mean.total.dtype)
    scale = tf.math.divide_no_nan(weight, added)
    mean.total.assign(total + (mean.total.value - total) * scale)
    mean.count.assign(count + tf.cast(tf.where(added > 0, weight, 0.0), mean.count.dtype))
