"""The steps that Keras' loops run on each batch, on one rank of several.

What devices compute of a batch stands apart, and may be compiled by XLA; here is what communicates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import ModelError
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.keras.additive_metrics import AdditiveMetrics
from hvdtrain.keras.compute import Compute
from hvdtrain.keras.compute.interface import BatchWeight, rows_of
from hvdtrain.keras.data import Share
from hvdtrain.keras.joint_results import Predicted
from hvdtrain.keras.loss_weights import LossWeights, are_sums, has_vector_losses, ratio
from hvdtrain.keras.model_parts import optimizers_of, overrides
from hvdtrain.keras.moving_statistics import MovingStatistics
from hvdtrain.keras.optimizer_patch import weighting
from hvdtrain.keras.rank_random import MemberGenerator, drawn_by
from hvdtrain.private_api.keras import compiled_loss
from hvdtrain.tensorflow.graph_order import NoShadowError, collectives_of, shadow

__all__ = ["ModelSteps"]


class ModelSteps:
    """train_step, test_step and predict_step for one model.

    Args:
        weights: The factors of this rank's loss; those of one of ``reducer``'s ranks if not given.
        synchronized: Layers that normalize with the moments of the joint batch.
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
        """The rows that count in the step of training that is traced or run; None between steps."""
        self.statistics = MovingStatistics(model, synchronized)
        """What layers keep of their batches."""
        self.additive = AdditiveMetrics(model)
        """Finds metrics that ranks can't join."""
        self._member = world.collectives().member
        self._variables = [variable.path for variable in self._watched_variables]
        self._plain_train_step = model.train_step
        self.joint_rows_known = False
        self.samples = keras.Variable(0, dtype="int64", trainable=False, name="samples")
        """The number of samples that this rank has trained on."""
        self.ran = keras.Variable(0, dtype="int64", trainable=False, name="ran")
        """The number of training steps that ran in this process, the one in work included."""
        self.predicted_rows: list[Any] = []
        """``Predicted.rows`` of each step of a prediction."""
        self.rows = keras.Variable(0, dtype="int64", trainable=False, name="rows")
        """The number of samples that counted in the last step, of training or of a test."""

    def train(self, data: Any) -> Any:
        """``train_step`` on an element of a sharded dataset, or on a batch of this rank."""
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
            with (
                _counting_rows(self._model, share.rows),
                self.additive.trying(),
                self.statistics.moved_by(row_weight),
                drawn_by(self._member) as generator,
            ):
                if overrides(self._model, "train_step"):
                    return self._train_own(share, counts)
                return self._train_plain(share, counts, generator)
        finally:
            self.step_rows = None

    def test(self, data: Any) -> Any:
        """``test_step``; a batch that doesn't count leaves the metrics alone."""
        share = self._share_of(data)
        self.rows.assign(tf.cast(share.rows, tf.int64))
        # A rank may call test_on_batch alone.
        rows, joint_rows = (
            (share.rows, share.joint_rows) if isinstance(data, Share) else (None, None)
        )
        with _counting_rows(self._model, share.rows), self.additive.trying():
            return self._compute.test(share.batch, rows, joint_rows)

    def predict(self, data: Any) -> Any:
        """``predict_step``; for a share ``Predicted``."""
        if not isinstance(data, Share):
            return self._compute.predict(data)
        outputs = self._compute.predict(data.batch)
        counts = tf.stack([tf.cast(data.rows, tf.int64), tf.cast(rows_of(data.batch), tf.int64)])
        return Predicted(outputs, counts[tf.newaxis])

    def _train_plain(self, share: Share, counts: BatchWeight, generator: MemberGenerator) -> Any:
        """Train as ``keras.Model.train_step`` does, with the loss weighted for the joint batch."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(share.batch)

        def differentiate() -> Any:
            gradients, *others = self._compute.differentiate(x, y, sample_weight, counts)
            return [_parts(g, v) for g, v in zip(gradients, model.trainable_variables)], *others

        try:
            parts, terms, told = _if_rows(
                share.rows, differentiate, generator, model.get_metrics_result
            )
            factor = None
            # A compute_metrics of the user's may know of more than the metrics.
            results = model.get_metrics_result()
            told = {name: results.get(name, value) for name, value in told.items()}
        except NoShadowError:
            # The rank runs on a batch that does not count.
            parts, terms, told = differentiate()
            factor = tf.cast(share.rows > 0, tf.float32)
        gradients = [_joined(p, v) for p, v in zip(parts, model.trainable_variables)]
        only = terms[0] if len(terms) == 1 and not model.losses else None
        how = self._weights.weighting(are_sums(model), counts.weight, factor, only)
        if gradients:
            with weighting([model.optimizer], how):
                model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=1)
        return told

    def _train_own(self, share: Share, counts: BatchWeight) -> Any:
        """Run a ``train_step`` of the user's; its gradients are weighted when they are applied."""
        rows, joint_rows, weight = counts
        if has_vector_losses(self._model):
            weight *= ratio(joint_rows, rows)
        how = self._weights.weighting(are_sums(self._model), weight, weight, None)
        with (
            weighting(optimizers_of(self._model), how),
            self._weights.joint_loss(rows, joint_rows, "train"),
        ):
            return self._plain_train_step(share.batch)

    def _counts(self, share: Share) -> tuple[BatchWeight, tf.Tensor]:
        """Return the weight of the loss, and that of the rows if they were averaged."""
        sums = are_sums(self._model)
        if self._elastic and sums and self._model.losses:
            raise ModelError(
                "In an elastic job (--elastic) losses with reduction='sum' and regularization "
                "can't be told apart when a rank is lost. Use reduction='sum_over_batch_size', or "
                "--max-restarts in place of --elastic."
            )
        joint_rows = self._weights.joint_rows(share.rows, share.joint_rows, sums)
        row_weight = self._weights.weight(share.rows, joint_rows, sums=False)
        # The last call decides what the step contributes to an average of weights.
        weight = self._weights.weight(share.rows, joint_rows, sums)
        return BatchWeight(share.rows, joint_rows, weight), row_weight

    def _share_of(self, data: Any) -> Share:
        if isinstance(data, Share):
            return data if self.joint_rows_known else data._replace(joint_rows=None)
        # train_on_batch and its like: this rank's own batch.
        return Share(data, rows_of(data), None)

    @property
    def _watched_variables(self) -> list[Any]:
        """The variables that may not change: the trainable ones; all with a step of the user's own.

        Such a step says itself what it trains.
        """
        own = overrides(self._model, "train_step")
        return list(self._model.variables if own else self._model.trainable_variables)

    def _check_variables(self) -> None:
        now = [variable.path for variable in self._watched_variables]
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
    generator: MemberGenerator,
    afterwards: Callable[[], Any],
) -> Any:
    """Return what ``compute`` does; without rows take part in its collectives, and return zeros.

    The collectives get zeros as well, and the generator gives as many numbers.

    Args:
        afterwards: What will be called after it.

    Raises:
        NoShadowError: The step runs eagerly, or has collectives that can't be taken part in;
            or what is called afterwards takes tensors that exist with rows only.
    """
    if tf.executing_eagerly():
        raise NoShadowError("what a step does is known in graphs only")
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
        if not all(shape.rank is not None for shape, _ in specs):
            raise NoShadowError("the form of a result is not known")
        if _takes_inner_tensors(afterwards):
            raise NoShadowError("a metric holds tensors of its last update")
        generator.repeat()
        return [tf.zeros([size or 0 for size in shape], dtype) for shape, dtype in specs]

    tensors = iter(tf.cond(rows > 0, run, skip))
    leaves = [leaf if leaf is None else next(tensors) for leaf in tf.nest.flatten(results)]
    return tf.nest.pack_sequence_as(results, leaves)


def _takes_inner_tensors(call: Callable[[], Any]) -> bool:
    """Return whether ``call`` takes tensors of graphs that this one is not part of."""
    graph: Any = tf.compat.v1.get_default_graph()
    results = tf.nest.flatten(call())
    taken = [tensor for tensor, _ in graph.captures] + results
    reachable = set()
    while graph is not None:
        reachable.add(id(graph))
        graph = getattr(graph, "outer_graph", None)
    return any(tf.is_symbolic_tensor(t) and id(t.graph) not in reachable for t in taken)


def _parts(gradient: Any, variable: Any) -> Any:
    """Return the tensors of a gradient, which have the variable's shape or are rows of it."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    if gradient is not None:
        gradient.set_shape(variable.shape)
    return gradient


def _joined(parts: Any, variable: Any) -> Any:
    """Return the gradient of which ``_parts`` made this."""
    if isinstance(parts, tuple):
        return tf.IndexedSlices(*parts, tf.constant(list(variable.shape)))
    return parts


@contextmanager
def _counting_rows(model: keras.Model, rows: tf.Tensor) -> Iterator[None]:
    """Within the block the metrics count each row that counts, and no other.

    A batch without rows that count leaves them as they were. The losses of single outputs, which
    Keras tracks with a weight of one for each batch whose size it doesn't know, are weighted by
    rows.
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
