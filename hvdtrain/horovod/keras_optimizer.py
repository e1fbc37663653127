"""Optimizers that combine the gradients of all ranks, under Horovod's names.

``hvdtrain.DistributedOptimizer`` is the one for new programs: it compares ranks more closely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.errors import ModelError
from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.reduction_options import Groups
from hvdtrain.gradients.tape import check_mode
from hvdtrain.horovod.op_constants import Average, ReduceOp
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reducer_arguments import optimizer_reducer, trainable_weights_of
from hvdtrain.keras.optimizer_patch import (
    FiniteCheckMixin,
    GradientAveragingMixin,
    check_inner_optimizers,
    mix_in,
    plain_optimizers,
)

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]


class _HorovodOptimizer(GradientAveragingMixin):
    """A mixin for the class of a plain optimizer; saved as the plain class."""

    _hvdtrain_sums = False

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._hvdtrain_reducer.keep_local(var)

    def _clip_gradients(self, grads: Any) -> Any:
        # After those of several steps have been accumulated, of which Keras takes the mean.
        if self._hvdtrain_sums:
            grads = [gradient * self.gradient_accumulation_steps for gradient in grads]  # type: ignore[attr-defined]
        return super()._clip_gradients(grads)


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
        optimizer: One of Keras 3.
        name: Has no effect.
        device_dense: Where combined gradients are to be.
        device_sparse: Where combined gradients are to be that are ``tf.IndexedSlices``.
        compression: The type in which gradients travel; one of ``Compression``.
        sparse_as_dense: Make tensors of ``tf.IndexedSlices`` first.
        gradient_predivide_factor: With Average, divide by so much before summing, and by the rest
            of the number of ranks afterwards.
        op: Average or Sum.
        backward_passes_per_step: Add up the gradients of so many steps first.
        average_aggregated_gradients: Take the mean of the gradients of several steps instead.
        num_groups: The older name of ``groups``.
        groups: Combine gradients in so many groups, or those of each list of variables together;
            None for all at once.
        process_set: The ranks that take part; all of them if not given.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.

    Returns:
        The same optimizer, which is saved and loaded as the plain one.

    Raises:
        ModelError: It is none of Keras 3, has accumulated gradients already, or some ranks are
            parameter servers.
        ValueError: What was asked for does not fit together.
    """
    arguments = locals()
    check_mode("keras.DistributedOptimizer")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"Expected a Keras 3 optimizer, received {type(optimizer).__name__}. Optimizers of "
            "tf_keras, tf.compat.v1.train or keras.optimizers.legacy must be replaced by those of "
            "keras.optimizers."
        )
    reducer = optimizer_reducer(arguments)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        mix_in(optimizer, FiniteCheckMixin, reducer)
    check_inner_optimizers(optimizer)
    accumulates = backward_passes_per_step > 1
    sums = accumulates and not average_aggregated_gradients
    for plain in plain_optimizers(optimizer):
        if accumulates:
            steps = plain.gradient_accumulation_steps
            if plain.built or steps:
                raise ModelError(
                    f"Received backward_passes_per_step={backward_passes_per_step} for an "
                    f"optimizer that has been used, or has gradient_accumulation_steps={steps}; "
                    "expected a new one without."
                )
            plain.gradient_accumulation_steps = backward_passes_per_step
        mix_in(plain, _HorovodOptimizer, reducer)
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
        local_layers: One or more layers, built, whose gradients are not combined.

    All other arguments are those of ``DistributedOptimizer``.

    Raises:
        ModelError: As for ``DistributedOptimizer``.
        ValueError: ``local_layers`` are no layers, or what was asked for does not fit together.
    """
    arguments = locals()
    local = trainable_weights_of(arguments.pop("local_layers"))
    distributed = DistributedOptimizer(**arguments)
    for plain in plain_optimizers(distributed):
        for variable in local:
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
        filepath: Where the saved model is.
        custom_optimizers: Classes of optimizers that Keras doesn't know.
        custom_objects: Other things that it doesn't know, by name.
        compression: The type in which gradients travel; one of ``Compression``.
        legacy_opts: Must be False: Keras 3 has no legacy optimizers.

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
