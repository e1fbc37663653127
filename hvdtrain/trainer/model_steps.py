"""The steps that Keras' loops run on each batch of a rank.

Most collectives of a step are called here. ``hvdtrain.trainer.compute`` runs the model itself on
this rank's devices. That part may be compiled with XLA, which does not support collectives.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.frameworks.tensorflow.graph_order import NoShadowError, collectives_of, shadow
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.private_api.keras import compiled_loss
from hvdtrain.trainer.additive_metrics import AdditiveMetrics
from hvdtrain.trainer.compute import Compute
from hvdtrain.trainer.compute.one_device import BatchWeight, rows_of
from hvdtrain.trainer.data import Share
from hvdtrain.trainer.joint_results import Predicted
from hvdtrain.trainer.loss_weights import LossWeights, are_sums, has_vector_losses, ratio
from hvdtrain.trainer.model_parts import optimizers_of, overrides
from hvdtrain.trainer.moving_statistics import MovingStatistics
from hvdtrain.trainer.optimizer_patch import weighting
from hvdtrain.trainer.rank_random import RankGenerator, random_by_rank

__all__ = ["ModelSteps"]


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
        self._compute = compute
        compute.joint_loss = self._weights.joint_loss
        self.step_rows: tf.Tensor | None = None
        """The number of rows that count in the current training step; None between steps."""
        self.statistics = MovingStatistics(model, synchronized)
        self.additive = AdditiveMetrics(model)
        self._member = world.collectives().member
        self._variables = [variable.path for variable in self._fixed_variables]
        self._plain_train_step = model.train_step
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

    def train(self, data: Any) -> Any:
        """Run ``train_step``.

        ``data`` is either an element of a sharded dataset, or a batch that was passed to
        ``train_on_batch``.
        """
        self._check_variables()
        if self._elastic and isinstance(data, Share):
            tf.numpy_function(self._contributions.begin_step, [], [])
        share = self._share_of(data)
        counts, row_weight = self._counts(share)
        self.step_rows = share.rows
        self.rows.assign(tf.cast(share.rows, tf.int64))
        self.samples.assign_add(self.rows.value)
        self.ran.assign_add(1)
        try:
            with self.additive.trying(), random_by_rank(self._member) as generator:
                if overrides(self._model, "train_step"):
                    with self._weighting_rows(share.rows, row_weight):
                        return self._train_own(share, counts)
                return self._train_plain(share, counts, row_weight, generator)
        finally:
            self.step_rows = None

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
        """Run ``predict_step``.

        Return ``Predicted`` if ``data`` is an element of a sharded dataset.
        """
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
        self, share: Share, counts: BatchWeight, row_weight: tf.Tensor, generator: RankGenerator
    ) -> Any:
        """Train like ``keras.Model.train_step``, with a loss weighted by this rank's rows."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(share.batch)

        def differentiate() -> Any:
            within = functools.partial(self._weighting_rows, share.rows, row_weight)
            gradients, *others = self._compute.differentiate(within, x, y, sample_weight, counts)
            return [_parts(g, v) for g, v in zip(gradients, model.trainable_variables)], *others

        try:
            parts, terms, metrics = _if_rows(
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
        only = terms[0] if len(terms) == 1 and not model.losses else None
        how = self._weights.weighting(are_sums(model), counts.weight, factor, only)
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
        how = self._weights.weighting(are_sums(self._model), weight, weight, None)
        with (
            weighting(optimizers_of(self._model), how, self._compute.jit),
            self._weights.joint_loss(rows, joint_rows, "train"),
        ):
            return self._plain_train_step(share.batch)

    def _counts(self, share: Share) -> tuple[BatchWeight, tf.Tensor]:
        """Return two weights of this rank's batch: for its loss, and for a mean over rows."""
        sums = are_sums(self._model)
        if self._elastic and sums and self._model.losses:
            raise ModelError(
                "In an elastic job (--elastic) losses with reduction='sum' and regularization "
                "can't be separated when a rank is lost. Use reduction='sum_over_batch_size', or "
                "--max-restarts instead of --elastic."
            )
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

    @property
    def _fixed_variables(self) -> list[Any]:
        """The variables that may not be added, removed or reordered after ``distribute``.

        These are the trainable variables. If the model overrides ``train_step``, they are all
        variables.
        """
        own = overrides(self._model, "train_step")
        return list(self._model.variables if own else self._model.trainable_variables)

    def _check_variables(self) -> None:
        now = [variable.path for variable in self._fixed_variables]
        if now != self._variables:
            changed = sorted(set(now) ^ set(self._variables)) or ["their order"]
            raise ModelError(
                "The variables that are trained changed after hvdtrain.distribute(model): "
                f"{', '.join(changed)}. Add layers and set `trainable` first, then compile the "
                "model and call hvdtrain.distribute(model) again."
            )


def _if_rows(
    rows: tf.Tensor,
    compute: Callable[[], Any],
    otherwise: Callable[[], None],
    generator: RankGenerator,
    afterwards: Callable[[], Any],
) -> Any:
    """Call ``compute`` if this rank has rows. Otherwise only take part in its collectives.

    If this rank has no rows, ``otherwise`` is called. The collectives then receive zeros, and the
    results are zeros. ``generator`` draws as many random numbers as ``compute`` would draw.
    ``afterwards`` is the function that the caller will call next.

    Raises:
        NoShadowError: If the step runs eagerly. Also if it contains collectives that can't be
            called with zeros, or if ``afterwards`` uses tensors that exist only if there are rows.
    """
    if tf.executing_eagerly():
        raise NoShadowError("the operations of a step are known in graphs only")
    results: Any = None
    collectives: list[tf.Operation] = []
    specs: list[tuple[tf.TensorShape, tf.DType]] = []

    def run() -> list[tf.Tensor]:
        nonlocal results
        results = compute()
        collectives.extend(collectives_of(tf.compat.v1.get_default_graph()))
        leaves = [leaf for leaf in tf.nest.flatten(results) if leaf is not None]
        tensors = list(map(tf.convert_to_tensor, leaves))
        specs.extend((tensor.shape, tensor.dtype) for tensor in tensors)
        return tensors

    def skip() -> list[tf.Tensor]:
        shadow(collectives)
        if any(shape.rank is None for shape, _ in specs):
            raise NoShadowError("the shape of a result is not known")
        if _uses_inner_tensors(afterwards):
            raise NoShadowError("a metric holds tensors of its last update")
        generator.repeat()
        otherwise()
        return [tf.zeros([size or 0 for size in shape], dtype) for shape, dtype in specs]

    tensors = iter(tf.cond(rows > 0, run, skip))
    leaves = [leaf if leaf is None else next(tensors) for leaf in tf.nest.flatten(results)]
    return tf.nest.pack_sequence_as(results, leaves)


def _uses_inner_tensors(function: Callable[[], Any]) -> bool:
    """Return whether a function uses tensors of a graph that does not enclose the current graph."""
    graph: Any = tf.compat.v1.get_default_graph()
    results = tf.nest.flatten(function())
    used = [tensor for tensor, _ in graph.captures] + results
    enclosing = set()
    while graph is not None:
        enclosing.add(id(graph))
        graph = getattr(graph, "outer_graph", None)
    return any(tf.is_symbolic_tensor(t) and id(t.graph) not in enclosing for t in used)


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
