"""``DistributedOptimizer`` from ``horovod.tensorflow``, which also accepts TensorFlow 1 optimizers.

Optimizers from ``tf.compat.v1.train`` reduce gradients in sessions, in a tf.function and eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import keras_optimizer
from hvdtrain.compat.horovod.compression import Compression, Compressor
from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.compat.horovod.reducer_arguments import make_reducer
from hvdtrain.compat.horovod.reduction_arguments import Average, ReduceOp, Sum
from hvdtrain.errors import ModelError
from hvdtrain.gradients.buckets import Groups
from hvdtrain.gradients.mode import check_mode
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.trainer.optimizer_patch import mix_in

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce gradients over all ranks before it clips and applies them.

    ``optimizer`` is an optimizer from Keras 3 or ``tf.compat.v1.train``. Optimizers from
    ``tf.compat.v1.train`` reduce gradients in ``compute_gradients``, which ``minimize`` calls.
    ``use_locking`` is ignored. The other arguments are described in
    ``hvdtrain.keras.DistributedOptimizer``.

    Returns:
        The same optimizer.

    Raises:
        ModelError: In the same cases in which ``hvdtrain.keras.DistributedOptimizer`` raises it.
        ValueError: If the arguments contradict each other.
    """
    arguments = locals()
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        del arguments["use_locking"]
        return keras_optimizer.DistributedOptimizer(**arguments)
    check_mode("tensorflow.DistributedOptimizer")
    reducer = make_reducer(arguments, ops=(Average, Sum))
    steps = backward_passes_per_step
    if steps < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {steps}.")
    mix_in(optimizer, _ReducesGradients, reducer)
    optimizer._hvdtrain_accumulator = None
    if steps > 1:
        optimizer._hvdtrain_accumulator = _GradientAccumulator(
            steps, average=average_aggregated_gradients, sparse_as_dense=sparse_as_dense
        )
    optimizer._hvdtrain_has_reduced = False
    return optimizer


class _ReducesGradients:
    """Mixin with which a TensorFlow 1 optimizer reduces its gradients over all ranks."""

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_accumulator: _GradientAccumulator | None
    _hvdtrain_has_reduced: bool

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the reduction, so that each rank uses its own gradient."""
        self._hvdtrain_reducer.keep_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients like the original optimizer, and reduce them over all ranks.

        In a step that only accumulates gradients, this returns the sums of this rank's gradients so
        far. ``apply_gradients`` ignores these sums.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        gradients, variables = map(list, zip(*pairs))

        def reduce(values: Sequence[Any]) -> list[Any]:
            return self._hvdtrain_reducer.average(values, variables)

        if self._hvdtrain_accumulator is None:
            reduced = reduce(gradients)
        else:
            reduced = self._hvdtrain_accumulator.add(gradients, reduce)
        self._hvdtrain_has_reduced = True
        return list(zip(reduced, variables))

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Apply gradients. In a step that only accumulates gradients, nothing is applied.

        ``global_step`` is increased in every step.

        Raises:
            ModelError: If ``compute_gradients`` was never called. The gradients are then not
                reduced.
        """
        if not self._hvdtrain_has_reduced:
            raise ModelError(
                "apply_gradients requires gradients that this optimizer's compute_gradients has "
                "reduced. Call compute_gradients instead of tf.gradients, or drop "
                "DistributedOptimizer and reduce with a DistributedGradientTape or allreduce."
            )
        pairs = list(grads_and_vars)
        apply: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        if self._hvdtrain_accumulator is None:
            return apply(pairs, global_step, name)
        return self._hvdtrain_accumulator.apply_if_complete(
            [gradient for gradient, _ in pairs if gradient is not None],
            lambda: apply(pairs, None, name),
            global_step,
        )


class _GradientAccumulator:
    """Sums of the gradients of several steps.

    In a TensorFlow 1 graph, the sums are local variables. They are not saved in checkpoints,
    because they differ between ranks.
    """

    def __init__(self, steps: int, *, average: bool, sparse_as_dense: bool) -> None:
        self._steps = steps
        self._factor = 1.0 / steps if average else 1.0
        self._sparse_as_dense = sparse_as_dense
        self._graph: Any = None
        self._sums: list[Any] = []
        self._count: Any = None

    def add(
        self, gradients: Sequence[Any], reduce: Callable[[Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Add the gradients of one step and return the sums.

        After the last step, the sums are reduced.

        Args:
            gradients: Gradients of one step. A gradient that is None must be None in every step.
            reduce: Function that reduces complete sums. It must return None for each gradient that
                is None.

        Raises:
            ValueError: If a gradient is ``tf.IndexedSlices`` and ``sparse_as_dense`` is False.
        """
        dense = [self._dense(gradient) for gradient in gradients if gradient is not None]
        self._make_variables(dense)
        added = [total.assign_add(gradient) for total, gradient in zip(self._sums, dense)]
        with tf.control_dependencies(_dependencies(added)):
            # In a session, the result of assign_add need not be the variable's value.
            count = self._count.assign_add(1)
            sums = [total.read_value() for total in self._sums]

        def complete() -> list[tf.Tensor]:
            remaining = iter(sums)
            summed = [None if gradient is None else next(remaining) for gradient in gradients]
            reduced = [entry for entry in reduce(summed) if entry is not None]
            with tf.control_dependencies(_dependencies([*sums, *reduced])):
                reset = [total.assign(tf.zeros_like(total)) for total in self._sums]
                reset.append(self._count.assign(0))
            with tf.control_dependencies(_dependencies(reset)):
                return [tf.math.scalar_mul(self._factor, entry) for entry in reduced]

        results = iter(tf.cond(tf.equal(count, self._steps), complete, lambda: list(sums)))
        return [None if gradient is None else next(results) for gradient in gradients]

    def apply_if_complete(
        self, gradients: Sequence[Any], apply: Callable[[], Any], global_step: Any
    ) -> Any:
        """Call ``apply`` if the gradients of all accumulated steps have been reduced.

        ``global_step`` is increased in any case.

        Returns:
            In a graph, the operation that does this. In eager execution, None.
        """

        def applied() -> tf.Tensor:
            with tf.control_dependencies(_dependencies([apply()])):
                return tf.constant(True)

        with tf.control_dependencies(_dependencies(gradients)):
            complete = tf.equal(self._count.read_value(), 0)
        done = tf.cond(complete, applied, lambda: tf.constant(False))
        if global_step is not None:
            with tf.control_dependencies(_dependencies([done])):
                done = global_step.assign_add(tf.ones([], global_step.dtype.base_dtype))
        return None if tf.executing_eagerly() else tf.group(done)

    def _dense(self, gradient: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            raise ValueError(
                "backward_passes_per_step can't accumulate tf.IndexedSlices; pass "
                "sparse_as_dense=True."
            )
        return tf.convert_to_tensor(gradient)

    def _make_variables(self, gradients: Sequence[tf.Tensor]) -> None:
        """Create the variables for the sums, once or, in TensorFlow 1, once per graph."""

        def make(shape: Any, dtype: tf.DType, name: str) -> Any:
            return tf.compat.v1.Variable(
                lambda: tf.zeros(shape, dtype),
                trainable=False,
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
                name=f"accumulated_{name}",
                use_resource=True,
            )

        with tf.init_scope():
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            if self._count is not None and graph is self._graph:
                return
            self._graph = graph
            self._count = make([], tf.int32, "steps")
            self._sums = [make(g.shape, g.dtype, "gradient") for g in gradients]


def _dependencies(operations: Sequence[Any]) -> list[Any]:
    """Return operations as control dependencies; none in eager mode, where they have run."""
    return [] if tf.executing_eagerly() else [op for op in operations if op is not None]
