"""Computation of a batch by a process with several devices. Each device is called a tower.

The variables of the model exist only once. Each tower runs the model on its part of the batch. Loss
and metrics are then computed from the concatenated outputs of all towers, so that they are correct
for any kind of loss. The gradient of the loss flows back into each tower. Finally, the gradients
that the towers have for the same weight are added up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.private_api.keras import (
    clear_losses,
    compute_loss,
    flatten_layers,
    get_mask,
    loss_tracker,
    own_losses,
    set_mask,
)
from hvdtrain.trainer.backends.tensorflow.one_device import (
    BatchWeight,
    Within,
    call,
    rows_of,
    scaled_loss,
)
from hvdtrain.trainer.model_parts import layer_statistics, overrides

__all__ = ["Towers"]

# Batches are sliced on this device, so that each other device gets only its part.
_HOST = "/device:CPU:0"


class _Part(NamedTuple):
    """The part of a batch that a tower computes."""

    first: tf.Tensor  # its first row
    rows: tf.Tensor
    share: tf.Tensor  # rows as a share of the batch, from 0 to 1


class _Pass(NamedTuple):
    """The result of the forward pass of one tower."""

    device: str
    tape: tf.GradientTape
    outputs: Any
    added_losses: list[tf.Tensor]


class Towers:
    """Computes a batch on several devices. The methods are the same as in ``OneDevice``.

    Args:
        devices: Names of the devices. The first device also computes the loss and the metrics, and
            adds up gradients.

    Raises:
        ModelError: If a batch of this model can't be divided into parts.
    """

    joint_loss: Callable[..., Any]
    jit = False

    def __init__(self, model: keras.Model, devices: Sequence[str]) -> None:
        self._model = model
        self._devices = list(devices)
        _check_model(model)
        self._own_test = model.test_step if overrides(model, "test_step") else None
        self._own_predict = model.predict_step if overrides(model, "predict_step") else None

    def differentiate(
        self, within: Within, x: Any, y: Any, sample_weight: Any, counts: BatchWeight
    ) -> Any:
        """Run the forward and backward pass on all devices, and compute the metrics."""
        with within():
            return self._differentiate(x, y, sample_weight, counts)

    def _differentiate(self, x: Any, y: Any, sample_weight: Any, counts: BatchWeight) -> Any:
        model = self._model
        parts = self._divide(x)
        statistics = _Statistics(model, parts)
        passes = []
        for device, part in zip(self._devices, parts):
            passes.append(self._forward(device, part, x, training=True))
            statistics.take()
        statistics.join()
        leaves = [leaf for tower in passes for leaf in _float_leaves(tower)]
        with tf.device(self._devices[0]):
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                y_pred = self._join(passes, parts)
                with self.joint_loss(counts.rows, counts.joint_rows, "train") as terms:
                    scaled = scaled_loss(model, x, y, y_pred, sample_weight, counts)
            weights = model.trainable_weights
            # The loss may depend on weights directly, as regularization does.
            direct, inward = tape.gradient(scaled, (weights, leaves))
            metrics = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        columns = [direct, *_backward(passes, inward, weights)]
        with tf.device(self._devices[0]):
            gradients = [_add(*entries) for entries in zip(weights, *columns)]
        return gradients, terms, metrics

    def test(
        self, within: Within, batch: Any, rows: tf.Tensor | None, joint_rows: tf.Tensor | None
    ) -> Any:
        """Run Keras' ``test_step`` on all devices, and a custom one on the first device."""
        with within():
            return self._test(batch, rows, joint_rows)

    def _test(self, batch: Any, rows: tf.Tensor | None, joint_rows: tf.Tensor | None) -> Any:
        if self._own_test is not None:
            with tf.device(self._devices[0]), self.joint_loss(rows, joint_rows, "test"):
                return self._own_test(batch)
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        y_pred = self._outputs(x)
        with tf.device(self._devices[0]):
            with self.joint_loss(rows, joint_rows, "test"):
                loss = compute_loss(
                    model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False
                )
            loss_tracker(model).update_state(loss, sample_weight=rows_of(x))
            return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def predict(self, batch: Any) -> Any:
        """Run Keras' ``predict_step`` on all devices. Run a custom one on the first device only."""
        if self._own_predict is not None:
            with tf.device(self._devices[0]):
                return self._own_predict(batch)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return self._outputs(x)

    def _outputs(self, x: Any) -> Any:
        parts = self._divide(x)
        passes = [
            self._forward(device, part, x, training=False)
            for device, part in zip(self._devices, parts)
        ]
        with tf.device(self._devices[0]):
            return self._join(passes, parts)

    def _divide(self, x: Any) -> list[_Part]:
        """Divide a batch into a part for each tower. Sizes differ by at most one row."""
        rows, towers = rows_of(x), len(self._devices)
        bounds = [rows * index // towers for index in range(towers + 1)]
        return [
            _Part(
                first=first,
                rows=after - first,
                share=tf.cast(after - first, tf.float64) / tf.cast(rows, tf.float64),
            )
            for first, after in itertools.pairwise(bounds)
        ]

    def _forward(self, device: str, part: _Part, x: Any, *, training: bool) -> _Pass:
        # A tower without rows computes the first row of the batch and discards the result. Without
        # any row, layers that divide by the number of rows would give NaN, which stays NaN when it
        # is multiplied by zero.
        first = tf.where(part.rows > 0, part.first, 0)
        after = first + tf.maximum(part.rows, 1)
        with tf.device(_HOST):
            inputs = keras.tree.map_structure(
                lambda leaf: leaf if leaf is None else leaf[first:after], x
            )
        with tf.device(device), tf.GradientTape() as tape:
            outputs = call(self._model, inputs, training=training)
            outputs = keras.tree.map_structure(lambda output: _keep(output, part.rows), outputs)
        return _Pass(device, tape, outputs, _added_losses(self._model))

    def _join(self, passes: Sequence[_Pass], parts: Sequence[_Part]) -> Any:
        """Concatenate the outputs of all towers.

        Losses that layers added with ``add_loss`` are averaged over the towers, and added to the
        model.
        """
        losses = [
            tf.add_n([loss * tf.cast(part.share, loss.dtype) for loss, part in zip(column, parts)])
            for column in zip(*(tower.added_losses for tower in passes))
        ]
        clear_losses(self._model)
        if losses:
            self._model.add_loss(losses)
        return keras.tree.map_structure(_concatenate, *(tower.outputs for tower in passes))


class _Statistics:
    """Statistics that layers keep of their batches, such as the moving mean of BatchNormalization.

    Each tower starts with the values that the statistics had before the step. After the step, the
    statistics are set to the weighted mean of all towers' values. Integers are taken from the first
    tower.
    """

    def __init__(self, model: keras.Model, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._variables = layer_statistics(model)
        self._before = self._values()
        self._after: list[list[tf.Tensor]] = []

    def take(self) -> None:
        """Store the values after the pass of a tower, and restore the values before the step."""
        self._after.append(self._values())
        self._assign(self._before)

    def join(self) -> None:
        """Set each statistic to the weighted mean of all towers' values."""
        self._assign([self._mean(*column) for column in zip(self._before, *self._after)])

    def _mean(self, before: tf.Tensor, *after: tf.Tensor) -> tf.Tensor:
        if not before.dtype.is_floating:
            return after[0]
        changes = [
            tf.math.multiply_no_nan(value - before, tf.cast(part.share, before.dtype))
            for value, part in zip(after, self._parts)
        ]
        return before + tf.add_n(changes)

    def _values(self) -> list[tf.Tensor]:
        return [tf.identity(tf.convert_to_tensor(variable)) for variable in self._variables]

    def _assign(self, values: Sequence[tf.Tensor]) -> None:
        for variable, value in zip(self._variables, values):
            variable.assign(value)


def _check_model(model: keras.Model) -> None:
    instead = "leave --mode towers out, and start one rank per device (-np)."
    if overrides(model, "train_step"):
        raise ModelError(
            f"--mode towers does not support the train_step of {type(model).__name__}; override "
            f"compute_loss, or {instead}"
        )
    for number, entry in enumerate(getattr(model, "inputs", None) or ()):
        if entry.shape[0] is not None:
            raise ModelError(
                f"Input {number} of the model {model.name!r} has a fixed batch size of "
                f"{entry.shape[0]}, but each tower gets a part of the batch; remove batch_size "
                f"from the input, or {instead}"
            )


def _backward(
    passes: Sequence[_Pass], inward: Sequence[Any], weights: Sequence[Any]
) -> list[list[Any]]:
    """Return, for each tower, the gradients of all weights.

    ``inward`` contains the gradient of the loss with respect to each of the ``_float_leaves`` of
    all towers. It is None for a leaf on which the loss does not depend.
    """
    columns = []
    left = iter(inward)
    for tower in passes:
        pairs = [
            (leaf, gradient)
            for leaf, gradient in zip(_float_leaves(tower), left)
            if gradient is not None
        ]
        leaves, gradients = [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]
        with tf.device(tower.device):
            columns.append(tower.tape.gradient(leaves, weights, output_gradients=gradients))
    return columns


def _add(weight: Any, *gradients: Any) -> Any:
    """Return the sum of the towers' gradients for a weight, or None if no tower has one."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    if getattr(weight, "overwrite_with_gradient", False):
        # "Gradients" of float8 scales replace them; the largest scale fits all towers.
        return tf.reduce_max(tf.stack(present), axis=0)
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        return tf.IndexedSlices(
            tf.concat([gradient.values for gradient in present], axis=0),
            tf.concat([gradient.indices for gradient in present], axis=0),
            present[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in present])


def _float_leaves(tower: _Pass) -> list[tf.Tensor]:
    """Return the floating-point tensors of a tower, through which gradients flow back."""
    leaves = [*keras.tree.flatten(tower.outputs), *tower.added_losses]
    return [leaf for leaf in leaves if leaf.dtype.is_floating]


def _added_losses(model: keras.Model) -> list[tf.Tensor]:
    """Return the losses that layers added in the last forward pass, except regularization."""
    layers = [model, *flatten_layers(model, include_self=False)]
    losses = [tf.convert_to_tensor(loss) for layer in layers for loss in own_losses(layer)]
    for loss in losses:
        if loss.shape.rank != 0:
            raise ModelError(
                f"add_loss must get a scalar with --mode towers, got shape {loss.shape}; pass the "
                "mean over the samples."
            )
    return losses


def _keep(output: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return the first ``rows`` rows of an output, and of its mask if it has one."""
    if output.shape.rank == 0:
        raise ModelError(
            "Outputs must have a row for each sample with --mode towers, got a scalar; pass it to "
            "add_loss, or leave --mode towers out."
        )
    mask = get_mask(output)
    kept = output[:rows]
    if mask is not None:
        set_mask(kept, mask[:rows])
    return kept


def _concatenate(*outputs: tf.Tensor) -> tf.Tensor:
    """Concatenate the outputs of all towers. If they have masks, concatenate the masks too."""
    joined = tf.concat(outputs, axis=0)
    masks = [get_mask(output) for output in outputs]
    if masks[0] is not None:
        set_mask(joined, tf.concat(masks, axis=0))
    return joined
