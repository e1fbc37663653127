"""Optimizers that combine the gradients of all ranks, under Horovod's names.

``hvdtrain.DistributedOptimizer`` is the one for new programs: it compares ranks more closely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.errors import ModelError
from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.tape import check_averages
from hvdtrain.horovod.gradient_reduction import GradientReduction, Groups, trainable_weights_of
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reduce_ops import Average, ReduceOp, Sum, choose_op
from hvdtrain.keras.optimizer_patch import (
    AgreesOnFinite,
    check_parts_known,
    mix_in,
    plain_optimizers,
)

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]


class _Combines:
    """Mixed into the class of a plain optimizer; saved as the plain class."""

    _hvdtrain_reducer: GradientReduction
    _hvdtrain_local: dict[int, Any]
    _hvdtrain_sums = False
    _hvdtrain_applied: Sequence[Any]

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._hvdtrain_local[id(var)] = var

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        object.__setattr__(self, "_hvdtrain_applied", list(trainable_variables))
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        # After those of several steps have been accumulated, and before clipping.
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if steps and self._hvdtrain_sums:
            grads = [gradient * steps for gradient in grads]
        variables = self._hvdtrain_applied
        local = [n for n, v in enumerate(variables) if id(v) in self._hvdtrain_local]
        combined = self._hvdtrain_reducer.reduce(grads, variables, local)
        return super()._clip_gradients(combined)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Let an optimizer combine the gradients of all ranks before it clips and applies them.

    Args:
        optimizer: Of Keras 3.
        name: Of no effect.
        device_dense: As for ``GradientReduction``, and so are the others that are not named here.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        gradient_predivide_factor: See there.
        op: Average or Sum.
        backward_passes_per_step: Add up the gradients of so many steps first.
        average_aggregated_gradients: Take their mean instead.
        num_groups: The older name of ``groups``.
        groups: See there.
        process_set: See there.
        scale_local_gradients: See there.

    Returns:
        The same optimizer, which is saved and loaded as the plain one.

    Raises:
        ModelError: It is none of Keras 3, has accumulated gradients already, or some ranks are
            parameter servers.
        ValueError: What was asked for does not fit together.
    """
    check_averages("keras.DistributedOptimizer")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"Expected a Keras 3 optimizer, received {type(optimizer).__name__}. Optimizers of "
            "tf_keras, tf.compat.v1.train or keras.optimizers.legacy must be replaced by those of "
            "keras.optimizers."
        )
    if choose_op(op) not in (Average, Sum):
        raise ValueError(f"Received op={choose_op(op).name}; expected Average or Sum.")
    reduction = GradientReduction(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups or None,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and process_set.included():
        mix_in(optimizer, AgreesOnFinite, GradientReducer(process_set.collectives()))
    check_parts_known(optimizer)
    for plain in plain_optimizers(optimizer):
        if backward_passes_per_step > 1:
            _accumulate(plain, backward_passes_per_step)
        mix_in(plain, _Combines, reduction)
        # Not through Keras' own __setattr__, which would track it as part of what is saved.
        object.__setattr__(plain, "_hvdtrain_local", {})
        sums = backward_passes_per_step > 1 and not average_aggregated_gradients
        object.__setattr__(plain, "_hvdtrain_sums", sums)
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """``DistributedOptimizer``, but for layers that each rank has for itself.

    Args:
        optimizer: As for ``DistributedOptimizer``, and so are the others.
        name: See there.
        device_dense: See there.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        gradient_predivide_factor: See there.
        op: See there.
        groups: See there.
        process_set: See there.
        local_layers: One or more, built; their gradients are not combined.
        scale_local_gradients: See there.

    Raises:
        ModelError: As for ``DistributedOptimizer``.
        ValueError: ``local_layers`` are no layers, or what was asked for does not fit together.
    """
    variables = trainable_weights_of(local_layers)
    distributed = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for plain in plain_optimizers(distributed):
        for variable in variables:
            plain.register_local_var(variable)
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model and let its optimizer combine the gradients of all ranks.

    Args:
        filepath: Of a saved model.
        custom_optimizers: Classes of optimizers that Keras doesn't know.
        custom_objects: Other things that it doesn't know, by name.
        compression: As for ``DistributedOptimizer``.
        legacy_opts: False: Keras 3 has no legacy optimizers.

    Raises:
        ModelError: Legacy optimizers were asked for.
    """
    if legacy_opts:
        raise ModelError(
            "Received legacy_opts=True; Keras 3 has no legacy optimizers. Leave it out."
        )
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if model.compiled:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _accumulate(optimizer: Any, steps: int) -> None:
    """Let a plain optimizer apply the gradients of several steps together."""
    if optimizer.built or optimizer.gradient_accumulation_steps:
        raise ModelError(
            f"Received backward_passes_per_step={steps} for an optimizer that has been used, or "
            f"has gradient_accumulation_steps={optimizer.gradient_accumulation_steps}; expected a "
            "new one without."
        )
    optimizer.gradient_accumulation_steps = steps
