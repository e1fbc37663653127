"""Horovod's distributed gradient tapes.

New programs should use ``hvdtrain.DistributedGradientTape``, which checks more between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.horovod.compression import Compression, Compressor
from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.compat.horovod.reducer_arguments import make_reducer, trainable_weights
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp
from hvdtrain.gradients.buckets import Groups
from hvdtrain.gradients.mode import check_mode
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.backends.tensorflow import gradient_tape

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _HorovodTape(gradient_tape.DistributedGradientTape):
    """A distributed gradient tape whose methods have the same arguments as in Horovod."""

    def __init__(self, gradtape: tf.GradientTape, reducer: GradientReducer) -> None:
        self._hvdtrain_reducer = reducer

    def register_local_source(self, source: Any) -> None:
        """Exclude a variable from the reduction, so that each rank uses its own gradient."""
        self._hvdtrain_reducer.keep_local(source)

    def gradient(  # type: ignore[override]  # Horovod's arguments are positional
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Compute gradients like ``tf.GradientTape.gradient``, and reduce them over all ranks.

        ``sources`` must be the same on all ranks. ``use_generic_names`` is ignored.
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
        """Return two lists of (source, gradient) pairs: for local sources and for all others.

        Local sources are those whose gradients are not reduced.
        """
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
    """Return a tape whose ``gradient`` reduces gradients over all ranks.

    ``gradtape`` is the tape that recorded the loss. It can still be used afterwards. ``op`` may be
    any reduction. The other arguments are described in ``hvdtrain.keras.DistributedOptimizer``.

    Raises:
        ValueError: If the arguments contradict each other.
        ModelError: If some ranks are parameter servers.
    """
    arguments = locals()
    check_mode("tensorflow.DistributedGradientTape")
    return _HorovodTape(gradtape, make_reducer(arguments))


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
    """Return a ``DistributedGradientTape`` that does not reduce the gradients of ``local_layers``.

    Raises:
        ValueError: If ``local_layers`` contains something other than layers, or the arguments
            contradict each other.
        ModelError: If some ranks are parameter servers.
    """
    arguments = locals()
    check_mode("tensorflow.PartialDistributedGradientTape")
    reducer = make_reducer(arguments)
    for variable in trainable_weights(local_layers):
        reducer.keep_local(variable)
    return _HorovodTape(gradtape, reducer)
