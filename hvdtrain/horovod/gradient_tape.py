"""Gradient tapes whose gradients are those of all ranks, under Horovod's names.

``hvdtrain.DistributedGradientTape`` is the one for new programs: it compares ranks more closely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.gradients import tape
from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.reduction_options import Groups
from hvdtrain.gradients.tape import check_mode
from hvdtrain.horovod.op_constants import Average, ReduceOp
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reducer_arguments import reducer_for, trainable_weights_of

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _HorovodTape(tape.DistributedGradientTape):
    """A distributed tape whose methods take what those of Horovod's tapes take."""

    def __init__(self, gradtape: tf.GradientTape, reducer: GradientReducer) -> None:
        self._hvdtrain_reducer = reducer

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._hvdtrain_reducer.keep_local(source)

    def gradient(  # type: ignore[override]  # Horovod counts arguments by their places, too
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Compute what ``tf.GradientTape.gradient`` does, combined over all ranks.

        ``sources`` are the same on all ranks. ``use_generic_names`` has no effect: what is
        combined goes by its order.
        """
        return super().gradient(
            target,
            sources,
            output_gradients=output_gradients,
            unconnected_gradients=unconnected_gradients,
        )

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """``gradient``, as pairs of source and gradient: of local sources, and of all others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients))
        is_local = self._hvdtrain_reducer.is_local
        local = [pair for pair in pairs if is_local(pair[0])]
        return local, [pair for pair in pairs if not is_local(pair[0])]


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose ``gradient`` returns the gradients of all ranks combined.

    Args:
        gradtape: The tape that recorded the loss; it stays as it is.
        op: How gradients are combined; any ``ReduceOp``.

    All other arguments are those of ``hvdtrain.keras.DistributedOptimizer``.

    Raises:
        ValueError: What was asked for does not fit together.
        ModelError: Some ranks are parameter servers.
    """
    arguments = locals()
    check_mode("tensorflow.DistributedGradientTape")
    return _HorovodTape(gradtape, reducer_for(arguments))


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """``DistributedGradientTape``, but for layers that each rank has for itself.

    Args:
        local_layers: One or more layers whose gradients are not combined.

    All other arguments are those of ``DistributedGradientTape``.

    Raises:
        ValueError: ``local_layers`` are no layers, or what was asked for does not fit together.
        ModelError: Some ranks are parameter servers.
    """
    arguments = locals()
    check_mode("tensorflow.PartialDistributedGradientTape")
    reducer = reducer_for(arguments)
    for variable in trainable_weights_of(local_layers):
        reducer.keep_local(variable)
    return _HorovodTape(gradtape, reducer)
