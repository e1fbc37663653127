"""Gradients of several steps added up on each rank, in sessions as in TensorFlow 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Accumulation"]


class Accumulation:
    """Adds up gradients until those of so many steps are together.

    The sums are local variables in a graph of TensorFlow 1: checkpoints don't hold them, as they
    are each rank's own.

    Args:
        passes: How many steps belong together.
        averages: Take the mean of their gradients instead of the sum.
        as_dense: Make tensors of ``tf.IndexedSlices``.
    """

    def __init__(self, passes: int, *, averages: bool, as_dense: bool) -> None:
        self._passes = passes
        self._averages = averages
        self._as_dense = as_dense
        self._place: Any = None
        self._sums: list[Any] = []
        self._count: Any = None

    def add(
        self, gradients: Sequence[Any], combine: Callable[[Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Add those of one step; the same ones are None in all steps.

        Returns what ``combine`` does, given complete sums (None stays None); before, the sums so
        far.

        Raises:
            ValueError: There are ``tf.IndexedSlices`` among them, and no tensors are made of them.
        """
        dense = [self._dense(gradient) for gradient in gradients if gradient is not None]
        self._make_variables(dense)
        added = [kept.assign_add(gradient) for kept, gradient in zip(self._sums, dense)]
        with tf.control_dependencies(_in_graph(added)):
            # Read again: in a session an update of a variable and its value are two things.
            count = self._count.assign_add(1)
            sums = [kept.read_value() for kept in self._sums]

        def complete() -> list[tf.Tensor]:
            factor = 1.0 / self._passes if self._averages else 1.0
            places = iter(sums)
            summed = [None if gradient is None else next(places) for gradient in gradients]
            combined = [entry for entry in combine(summed) if entry is not None]
            with tf.control_dependencies(_in_graph([*sums, *combined])):
                reset = [kept.assign(tf.zeros_like(kept)) for kept in self._sums]
                reset.append(self._count.assign(0))
            with tf.control_dependencies(_in_graph(reset)):
                return [tf.math.scalar_mul(factor, entry) for entry in combined]

        results = iter(tf.cond(tf.equal(count, self._passes), complete, lambda: list(sums)))
        return [None if gradient is None else next(results) for gradient in gradients]

    def when_complete(
        self, gradients: Sequence[Any], apply: Callable[[], Any], global_step: Any
    ) -> Any:
        """Call ``apply`` if the gradients are those that ``combine`` returned.

        ``global_step`` is counted in each step, if given. In a graph, returns what does it.
        """

        def applied() -> tf.Tensor:
            with tf.control_dependencies(_in_graph([apply()])):
                return tf.constant(True)

        with tf.control_dependencies(_in_graph(gradients)):
            complete = tf.equal(self._count.read_value(), 0)
        done = tf.cond(complete, applied, lambda: tf.constant(False))
        if global_step is None:
            return _operation(done)
        with tf.control_dependencies(_in_graph([done])):
            return _operation(global_step.assign_add(tf.ones([], global_step.dtype.base_dtype)))

    def _dense(self, gradient: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._as_dense:
            raise ValueError(
                "Received tf.IndexedSlices where backward_passes_per_step adds up the gradients of "
                "several steps; expected tensors. Pass sparse_as_dense=True."
            )
        return tf.convert_to_tensor(gradient)

    def _make_variables(self, gradients: Sequence[tf.Tensor]) -> None:
        """Make the variables once for all functions, and once in each graph of TensorFlow 1."""
        with tf.init_scope():
            place = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            if self._count is not None and place is self._place:
                return
            self._place = place
            self._count = _local_variable([], tf.int32, "steps")
            self._sums = [_local_variable(g.shape, g.dtype, "gradient") for g in gradients]


def _local_variable(shape: Any, dtype: tf.DType, what: str) -> Any:
    return tf.compat.v1.Variable(
        lambda: tf.zeros(shape, dtype),
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        name=f"accumulated_{what}",
        use_resource=True,
    )


def _in_graph(things: Sequence[Any]) -> list[Any]:
    """Return what can be waited for: nothing where it is eager, as all is done already."""
    return [] if tf.executing_eagerly() else [thing for thing in things if thing is not None]


def _operation(result: Any) -> Any:
    return None if tf.executing_eagerly() else tf.group(result)
