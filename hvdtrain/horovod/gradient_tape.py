"""Gradient tapes whose gradients are those of all ranks, under Horovod's names.

``hvdtrain.DistributedGradientTape`` is the one for new programs: it compares ranks more closely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.tape import check_averages
from hvdtrain.horovod.gradient_reduction import GradientReduction, Groups, trainable_weights_of
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reduce_ops import Average, ReduceOp

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed:
    """Mixed into the class of a tape."""

    _hvdtrain_reduction: GradientReduction
    _hvdtrain_local: dict[int, Any]

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._hvdtrain_local[id(source)] = source

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """As ``tf.GradientTape.gradient``, combined over all ranks.

        Args:
            target: What is differentiated.
            sources: With respect to what; the same on all ranks.
            output_gradients: Of ``target``.
            use_generic_names: Of no effect: what is combined goes by its order.
            unconnected_gradients: What there is for sources that ``target`` doesn't depend on.
        """
        own: Any = super()
        gradients = own.gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(sources)
        local = [n for n, source in enumerate(flat) if id(source) in self._hvdtrain_local]
        reduced = self._hvdtrain_reduction.reduce(tf.nest.flatten(gradients), flat, local)
        return tf.nest.pack_sequence_as(gradients, reduced)

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
        local = [pair for pair in pairs if id(pair[0]) in self._hvdtrain_local]
        return local, [pair for pair in pairs if id(pair[0]) not in self._hvdtrain_local]


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
        device_dense: As for ``GradientReduction``, and so are the others.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        op: See there.
        gradient_predivide_factor: See there.
        num_groups: The older name of ``groups``.
        groups: See there.
        process_set: See there.
        scale_local_gradients: See there.

    Raises:
        ValueError: What was asked for does not fit together.
        ModelError: Some ranks are parameter servers.
    """
    check_averages("tensorflow.DistributedGradientTape")
    kind = type(gradtape)
    tape: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    tape.__dict__ = gradtape.__dict__  # one recording, whichever of the two is asked
    tape._hvdtrain_local = {}
    tape._hvdtrain_reduction = GradientReduction(
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
    return tape


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
        gradtape: As for ``DistributedGradientTape``, and so are the others.
        device_dense: See there.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        op: See there.
        gradient_predivide_factor: See there.
        num_groups: See there.
        groups: See there.
        process_set: See there.
        local_layers: One or more; their gradients are not combined.
        scale_local_gradients: See there.

    Raises:
        ValueError: ``local_layers`` are no layers, or what was asked for does not fit together.
    """
    variables = trainable_weights_of(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables:
        tape.register_local_source(variable)
    return tape
