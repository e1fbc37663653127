"""Towers: one process computes on several devices, on each with a part of its batch.

The variables are there once. Each tower runs the model on its part; the outputs are joined, and
loss and metrics are those of the whole batch, whatever the loss is made of. From there the
gradient of the loss goes back into each tower, and what the towers find for a weight is added up:
the loss being a mean over the whole batch, that is the average over the towers, weighted by what
each part counts for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.keras.compute.interface import BatchWeight, call, rows_of, scaled_loss
from hvdtrain.keras.model_parts import layer_statistics, overrides
from hvdtrain.private_api.keras import (
    clear_losses,
    compute_loss,
    flatten_layers,
    get_mask,
    loss_tracker,
    own_losses,
    set_mask,
)

__all__ = ["Towers"]

# Batches come from there; a device needn't see the others' parts.
_HOST = "/device:CPU:0"


class _Part(NamedTuple):
    """The part of a batch that a tower computes.

    Attributes:
        first: The first one.
        rows: How many they are.
        share: The same of the whole batch, from 0 to 1.
    """

    first: tf.Tensor
    rows: tf.Tensor
    share: tf.Tensor


class _Pass(NamedTuple):
    """The result of a tower's forward pass.

    Attributes:
        device: Where it ran.
        tape: Knows how.
        outputs: The model's; structured as the model returns them.
        losses: That layers have added.
    """

    device: str
    tape: tf.GradientTape
    outputs: Any
    losses: list[tf.Tensor]


class Towers:
    """Computes a batch on several devices.

    Args:
        devices: Their names; loss, metrics and sums of gradients are computed on the first.

    Raises:
        ModelError: Batches of this model can't be cut into parts.
    """

    joint_loss: Callable[..., Any]

    def __init__(self, model: keras.Model, devices: Sequence[str]) -> None:
        self._model = model
        self._devices = list(devices)
        _check_fits(model)
        self._own_test = model.test_step if overrides(model, "test_step") else None
        self._own_predict = model.predict_step if overrides(model, "predict_step") else None

    def differentiate(self, x: Any, y: Any, sample_weight: Any, counts: BatchWeight) -> Any:
        """Run the forward and backward pass on all devices; see ``Compute``."""
        model = self._model
        parts = self._cut(x)
        statistics = _Statistics(model, parts)
        passes = []
        for device, part in zip(self._devices, parts):
            passes.append(self._forward(device, part, x, training=True))
            statistics.take()
        statistics.join()
        leaves = _float_leaves(passes)
        with tf.device(self._devices[0]):
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                y_pred = self._join(passes, parts)
                with self.joint_loss(counts.rows, counts.joint_rows, "train") as terms:
                    scaled = scaled_loss(model, x, y, y_pred, sample_weight, counts)
            weights = model.trainable_weights
            # Regularization, and whatever else a loss makes of weights themselves.
            direct, inward = tape.gradient(scaled, (weights, leaves))
            metrics = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        found = [direct, *_backward(passes, inward, weights)]
        with tf.device(self._devices[0]):
            gradients = [_add_up(*entries) for entries in zip(weights, *found)]
        return gradients, terms, metrics

    def test(self, batch: Any, rows: tf.Tensor | None, joint_rows: tf.Tensor | None) -> Any:
        """Keras' ``test_step`` on all devices; one of the user's on the first."""
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
        """Keras' ``predict_step`` on all devices; one of the user's on the first."""
        if self._own_predict is not None:
            with tf.device(self._devices[0]):
                return self._own_predict(batch)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return self._outputs(x)

    def _outputs(self, x: Any) -> Any:
        """The model's outputs for a batch, computed on all devices; not for training."""
        parts = self._cut(x)
        passes = [
            self._forward(device, part, x, training=False)
            for device, part in zip(self._devices, parts)
        ]
        with tf.device(self._devices[0]):
            return self._join(passes, parts)

    def _cut(self, x: Any) -> list[_Part]:
        """The parts of a batch, whose numbers of samples differ by one at most."""
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
        # A tower without samples computes one of another's, of which nothing is kept: layers that
        # divide by the number of samples give NaN for none, and times zero that stays NaN.
        first = tf.where(part.rows > 0, part.first, 0)
        after = first + tf.maximum(part.rows, 1)
        with tf.device(_HOST):
            mine = keras.tree.map_structure(
                lambda leaf: leaf if leaf is None else leaf[first:after], x
            )
        with tf.device(device), tf.GradientTape() as tape:
            outputs = call(self._model, mine, training=training)
            kept = keras.tree.map_structure(lambda output: _keep(output, part.rows), outputs)
        return _Pass(device, tape, kept, _added_losses(self._model))

    def _join(self, passes: Sequence[_Pass], parts: Sequence[_Part]) -> Any:
        """The outputs of all towers as those of one, and what layers added to the loss."""
        losses = [
            tf.add_n([loss * tf.cast(part.share, loss.dtype) for loss, part in zip(alike, parts)])
            for alike in zip(*(entry.losses for entry in passes))
        ]
        clear_losses(self._model)
        if losses:
            self._model.add_loss(losses)
        return keras.tree.map_structure(_concatenate, *(entry.outputs for entry in passes))


class _Statistics:
    """Statistics that layers keep of their batches, such as BatchNorm's moving moments, by tower.

    Each tower begins with what there was before the step, and the mean of what they make of it is
    kept, as between ranks. Of whole numbers, which have no mean, the first tower's are kept.
    """

    def __init__(self, model: keras.Model, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._variables = layer_statistics(model)
        self._before = self._values()
        self._after: list[list[tf.Tensor]] = []

    def take(self) -> None:
        """Keep the values after a tower's pass and put back those before; called after each."""
        self._after.append(self._values())
        self._assign(self._before)

    def join(self) -> None:
        """Assign the towers' joint values; called when all towers had their pass."""
        self._assign([self._joined(*column) for column in zip(self._before, *self._after)])

    def _joined(self, before: tf.Tensor, *after: tf.Tensor) -> tf.Tensor:
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


def _check_fits(model: keras.Model) -> None:
    instead = "Leave --mode towers out, and start one rank a device (-np) instead."
    if overrides(model, "train_step"):
        raise ModelError(
            f"{type(model).__name__} has a train_step of its own, which can't be cut into towers; "
            f"a compute_loss of its own could. {instead}"
        )
    for number, entry in enumerate(getattr(model, "inputs", None) or ()):
        if entry.shape[0] is not None:
            raise ModelError(
                f"Input {number} of the model {model.name!r} takes batches of {entry.shape[0]} and "
                "no others, but a tower gets a part of the batch. Leave batch_size out where the "
                f"input is made. {instead}"
            )


def _backward(
    passes: Sequence[_Pass], inward: Sequence[Any], weights: Sequence[Any]
) -> list[list[Any]]:
    """Return for each tower the gradients of all weights.

    Args:
        inward: The loss's gradients, one for each of ``_float_leaves``; None where it has none.
    """
    found = []
    rest = list(inward)
    for entry in passes:
        leaves = _float_leaves([entry])
        mine, rest = rest[: len(leaves)], rest[len(leaves) :]
        pairs = [(leaf, gradient) for leaf, gradient in zip(leaves, mine) if gradient is not None]
        with tf.device(entry.device):
            found.append(
                entry.tape.gradient(
                    [leaf for leaf, _ in pairs],
                    weights,
                    output_gradients=[gradient for _, gradient in pairs],
                )
            )
    return found


def _add_up(weight: Any, *gradients: Any) -> Any:
    """The gradients of all towers for one weight as one; None where no tower has any."""
    found = [gradient for gradient in gradients if gradient is not None]
    if len(found) < 2:
        return found[0] if found else None
    if getattr(weight, "overwrite_with_gradient", False):
        # float8 scales travel as "gradients"; the largest is the one that fits.
        return tf.reduce_max(tf.stack(found), axis=0)
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in found):
        return tf.IndexedSlices(
            tf.concat([gradient.values for gradient in found], axis=0),
            tf.concat([gradient.indices for gradient in found], axis=0),
            found[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in found])


def _float_leaves(passes: Sequence[_Pass]) -> list[tf.Tensor]:
    """Return the tensors through which gradients go back into the towers, in the towers' order."""
    leaves = [
        leaf for entry in passes for leaf in (*keras.tree.flatten(entry.outputs), *entry.losses)
    ]
    return [leaf for leaf in leaves if leaf.dtype.is_floating]


def _added_losses(model: keras.Model) -> list[tf.Tensor]:
    """Return the losses that layers added in the last forward pass; not regularization."""
    layers = [model, *flatten_layers(model, include_self=False)]
    losses = [tf.convert_to_tensor(loss) for layer in layers for loss in own_losses(layer)]
    for loss in losses:
        if loss.shape.rank != 0:
            raise ModelError(
                f"A layer's add_loss was given values of the shape {loss.shape}, which the towers' "
                "can't be joined of; expected a scalar, the mean over the samples."
            )
    return losses


def _keep(output: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """The first rows of an output and of its mask."""
    if output.shape.rank == 0:
        raise ModelError(
            "An output of the model is a single number, so that the towers' can't be joined; "
            "expected one row for each sample. Put it into the loss with add_loss, or leave "
            "--mode towers out."
        )
    mask = get_mask(output)
    kept = output[:rows]
    if mask is not None:
        set_mask(kept, mask[:rows])
    return kept


def _concatenate(*outputs: tf.Tensor) -> tf.Tensor:
    """One output of all towers; its mask too."""
    joined = tf.concat(outputs, axis=0)
    masks = [get_mask(output) for output in outputs]
    if masks[0] is not None:
        set_mask(joined, tf.concat(masks, axis=0))
    return joined
