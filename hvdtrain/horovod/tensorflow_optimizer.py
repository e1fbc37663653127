"""``DistributedOptimizer`` with the arguments that ``horovod.tensorflow`` gives it.

Optimizers of ``tf.compat.v1.train`` combine gradients in a session, eagerly, and in a tf.function,
as far as they work there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.errors import ModelError
from hvdtrain.gradients.compression import Compression, Compressor
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.gradients.reduction_options import Groups
from hvdtrain.gradients.tape import check_mode
from hvdtrain.horovod import keras_optimizer
from hvdtrain.horovod.op_constants import Average, ReduceOp
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reducer_arguments import optimizer_reducer
from hvdtrain.keras.optimizer_patch import mix_in

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
    """Let an optimizer combine the gradients of all ranks before it clips and applies them.

    Args:
        optimizer: One of Keras 3, or of ``tf.compat.v1.train``: that one combines gradients in
            ``compute_gradients``, and with it in ``minimize``.
        use_locking: Has no effect.

    All other arguments are those of ``hvdtrain.keras.DistributedOptimizer``.

    Returns:
        The same optimizer.

    Raises:
        ModelError: As for ``hvdtrain.keras.DistributedOptimizer``.
        ValueError: What was asked for does not fit together.
    """
    arguments = locals()
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        del arguments["use_locking"]
        return keras_optimizer.DistributedOptimizer(**arguments)
    check_mode("tensorflow.DistributedOptimizer")
    reducer = optimizer_reducer(arguments)
    passes = backward_passes_per_step
    if passes < 1:
        raise ValueError(f"Received backward_passes_per_step={passes}; expected 1 or more.")
    mix_in(optimizer, _CombinesGradients, reducer)
    optimizer._hvdtrain_accumulation = None
    if passes > 1:
        optimizer._hvdtrain_accumulation = _Accumulation(
            passes, averages=average_aggregated_gradients, as_dense=sparse_as_dense
        )
    optimizer._hvdtrain_has_combined = False
    return optimizer


class _CombinesGradients:
    """A mixin for the class of a plain optimizer: combines the gradients of all ranks."""

    _hvdtrain_reducer: GradientReducer
    _hvdtrain_accumulation: _Accumulation | None
    _hvdtrain_has_combined: bool

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._hvdtrain_reducer.keep_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute what the plain optimizer does, combined over all ranks.

        Before the last of several steps that are accumulated, it is the sums so far of this rank
        alone, which ``apply_gradients`` leaves aside.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        gradients, variables = map(list, zip(*pairs))

        def combine(summed: Sequence[Any]) -> list[Any]:
            return self._hvdtrain_reducer.average(summed, variables)

        if self._hvdtrain_accumulation is None:
            combined = combine(gradients)
        else:
            combined = self._hvdtrain_accumulation.add(gradients, combine)
        self._hvdtrain_has_combined = True
        return list(zip(combined, variables))

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Apply gradients; ``global_step`` counts steps that are accumulated, too.

        Raises:
            ModelError: The gradients come from elsewhere than ``compute_gradients``.
        """
        if not self._hvdtrain_has_combined:
            raise ModelError(
                "apply_gradients received gradients that compute_gradients of this optimizer has "
                "not computed, so they may be those of one rank. Call compute_gradients instead of "
                "tf.gradients; or combine them with a DistributedGradientTape or allreduce, and "
                "leave DistributedOptimizer out."
            )
        pairs = list(grads_and_vars)
        apply: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        if self._hvdtrain_accumulation is None:
            return apply(pairs, global_step, name)
        return self._hvdtrain_accumulation.when_complete(
            [gradient for gradient, _ in pairs if gradient is not None],
            lambda: apply(pairs, None, name),
            global_step,
        )


class _Accumulation:
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
