"""How Horovod's optimizers and tapes combine the gradients of variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.horovod.collective_ops import grouped_allreduce
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reduce_ops import Average, ReduceOp, choose_op

__all__ = ["GradientReduction", "Groups", "trainable_weights_of"]

Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """What Horovod's users can ask for.

    Args:
        device_dense: Where combined gradients are to be.
        device_sparse: Where those are to be that are ``tf.IndexedSlices``.
        compression: The type in which they travel; one of ``Compression``.
        sparse_as_dense: Make tensors of ``tf.IndexedSlices`` first.
        op: How they are combined.
        gradient_predivide_factor: With Average, divide by so much before summing, and by the rest
            of the number of ranks afterwards.
        groups: Reduce them in so many groups, or those of each list of variables together; None
            for all at once.
        process_set: The ranks that take part; all of them if not given.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.

    Raises:
        ValueError: What was asked for does not fit together.
    """

    device_dense: str = ""
    device_sparse: str = ""
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.gradient_predivide_factor != 1.0 and choose_op(self.op) is not Average:
            raise ValueError(
                f"gradient_predivide_factor={self.gradient_predivide_factor} is for op=Average; "
                f"received op={choose_op(self.op).name}."
            )
        lists = isinstance(self.groups, Sequence) and not isinstance(self.groups, str)
        if not (self.groups is None or lists or (type(self.groups) is int and self.groups > 0)):
            raise ValueError(
                f"Received groups={self.groups!r}; expected a number of groups above 0, or a list "
                "of lists of variables."
            )

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int] = ()
    ) -> list[Any]:
        """Combine the gradients of all ranks.

        Args:
            gradients: Tensors, ``tf.IndexedSlices``, or None where a variable has none.
            variables: What they belong to; the same on all ranks.
            local: Numbers of the variables that each rank has for itself.
        """
        results = list(gradients)
        if not self.process_set.included():
            return results
        ranks = len(self.process_set.ranks)
        for n in local:
            if results[n] is not None and self.scale_local_gradients:
                results[n] = tf.math.scalar_mul(1.0 / ranks, results[n])
        shared = [n for n, g in enumerate(gradients) if g is not None and n not in local]
        if self.sparse_as_dense:
            for n in shared:
                results[n] = tf.convert_to_tensor(results[n])
        if ranks == 1:
            return results
        for group in self._grouped(shared, variables):
            combined = grouped_allreduce(
                [results[n] for n in group],
                device_dense=self.device_dense,
                device_sparse=self.device_sparse,
                compression=self.compression,
                op=self.op,
                prescale_factor=1.0 / self.gradient_predivide_factor,
                postscale_factor=self.gradient_predivide_factor,
                process_set=self.process_set,
            )
            for n, gradient in zip(group, combined):
                results[n] = gradient
        return results

    def _grouped(self, shared: Sequence[int], variables: Sequence[Any]) -> list[list[int]]:
        """The numbers in the groups that were asked for, without empty ones."""
        if self.groups is None:
            return [list(shared)] if shared else []
        if isinstance(self.groups, int):
            count = min(self.groups, len(shared))
            ends = [len(shared) * (n + 1) // count for n in range(count)]
            return [list(shared[a:b]) for a, b in zip([0, *ends], ends)]
        places = {id(variables[n]): n for n in shared}
        groups = [[places.pop(id(v)) for v in group if id(v) in places] for group in self.groups]
        return [group for group in (*groups, *([n] for n in places.values())) if group]


def trainable_weights_of(layers: Any) -> list[Any]:
    """The variables of one or more Keras layers, or of None.

    Raises:
        ValueError: Something else is among them.
    """
    given = layers if isinstance(layers, Sequence) else [layers]
    found: list[Any] = []
    for layer in () if layers is None else given:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"Received {type(layer).__name__} among local_layers; expected Keras layers."
            )
        found += layer.trainable_weights
    return found
