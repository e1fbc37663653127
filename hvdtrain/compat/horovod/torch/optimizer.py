"""Horovod's ``DistributedOptimizer`` for PyTorch.

Gradients are reduced in buckets. All ranks reduce the same buckets in the same order. The reduction
of a bucket starts as soon as the backward pass has computed the gradients of this bucket and of all
buckets before it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.compat.horovod.reduction_arguments import Adasum, Average, ReduceOp, choose_op
from hvdtrain.compat.horovod.torch.call_queue import calls
from hvdtrain.compat.horovod.torch.compression import Compression, Compressor
from hvdtrain.compat.horovod.torch.gradient_buckets import GradientBuckets, GradientOptions
from hvdtrain.frameworks.torch.tensors import array_of, tensor_of
from hvdtrain.gradients.array_reduction import reduce_arrays
from hvdtrain.gradients.buckets import Groups

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer reduce gradients over all ranks before each step.

    The optimizer gets these methods:

    - ``synchronize()`` waits until the gradients are reduced. Call it to clip the reduced gradients
      before ``step()``, for example.
    - ``skip_synchronize()`` returns a context manager. In its ``with`` block, ``step()`` does not
      call ``synchronize()`` again.
    - ``set_backward_passes_per_step(passes)`` sets the argument ``backward_passes_per_step``.

    Args:
        optimizer: Optimizer from ``torch.optim``, which is changed.
        named_parameters: ``model.named_parameters()``, whose names appear in errors.
        compression: Data type in which gradients are sent, such as ``Compression.fp16``.
        backward_passes_per_step: Number of backward passes whose gradients are added up before they
            are reduced.
        op: The reduction. With Adasum, each rank takes a step with its own gradients, and the ranks
            then combine the changes of their parameters.
        gradient_predivide_factor: With Average, gradients are divided by this factor before they
            are summed, and the sum is divided by ``size() / factor``.
        num_groups: Deprecated. Use ``groups`` instead.
        groups: Number of buckets, or a list of parameters for each bucket.
        sparse_as_dense: Whether to convert sparse gradients to dense gradients before they are
            reduced.
        process_set: Participating ranks. Defaults to all ranks.

    Returns:
        The same optimizer.

    Raises:
        ValueError: If the arguments contradict each other.
    """
    op = choose_op(op)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor} requires op=Average, got "
            f"op={op.name}."
        )
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}."
        )
    options = GradientOptions(
        op=op,
        compression=compression,
        prescale=1.0 / gradient_predivide_factor,
        postscale=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups or None,
        sparse_as_dense=sparse_as_dense,
    )
    names = _names_of(optimizer, named_parameters)
    if isinstance(optimizer, _ReducesGradients):
        raise ValueError("This optimizer is already distributed; call DistributedOptimizer once.")
    plain = type(optimizer)
    optimizer.__class__ = type(plain.__name__, (_ReducesGradients, plain), {})
    optimizer._hvdtrain_start(options, names, process_set, backward_passes_per_step)
    return optimizer


class _ReducesGradients:
    """Mixin with which an optimizer reduces its gradients over all ranks."""

    param_groups: list[dict[str, Any]]

    def _hvdtrain_start(
        self,
        options: GradientOptions,
        names: dict[Any, str],
        process_set: ProcessSet,
        passes: int,
    ) -> None:
        self.backward_passes_per_step = passes
        self._parameter_names = names
        self._hvdtrain_passes: dict[int, int] = {}
        self._hvdtrain_buckets = GradientBuckets(options, process_set)
        self._hvdtrain_synchronized = False
        self._hvdtrain_skips = False
        self._hvdtrain_watched: set[int] = set()
        self._hvdtrain_ids: list[int] = []
        self._hvdtrain_alone = process_set.alone
        # Hooks instead of an override of step, because schedulers keep the original step.
        hooks: Any = self
        if options.op is Adasum and not self._hvdtrain_alone:
            adasum = _AdasumOfChanges(self._hvdtrain_parameters, process_set)
            hooks.register_step_pre_hook(lambda *_: adasum.begin())
            hooks.register_step_post_hook(lambda *_: adasum.finish())
            self._hvdtrain_alone = True
        self._hvdtrain_is_adasum = options.op is Adasum
        hooks.register_step_pre_hook(_before_step)
        self._hvdtrain_watch()

    def _hvdtrain_parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def _hvdtrain_watch(self) -> None:
        """Find the parameters to train, and add hooks that run when gradients are computed."""
        parameters = [p for p in self._hvdtrain_parameters() if p.requires_grad]
        ids = list(map(id, parameters))
        if ids == self._hvdtrain_ids or self._hvdtrain_buckets.started:
            return
        self._hvdtrain_ids = ids
        method = weakref.WeakMethod(self._hvdtrain_on_gradient)

        def on_gradient(parameter: Any) -> None:
            # Parameters must not keep an optimizer that the program has replaced.
            if (call := method()) is not None:
                call(parameter)

        for parameter in parameters:
            if id(parameter) not in self._hvdtrain_watched:
                self._hvdtrain_watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(on_gradient)
        if not self._hvdtrain_alone:
            names = self._parameter_names
            self._hvdtrain_buckets.divide(
                parameters, [names.get(p, f"parameter {n}") for n, p in enumerate(parameters)]
            )

    def _hvdtrain_on_gradient(self, parameter: Any) -> None:
        if not self._hvdtrain_passes:
            self._hvdtrain_watch()  # the program may have frozen parameters, or trains more
        passes = self._hvdtrain_passes.get(id(parameter), 0) + 1
        if passes > self.backward_passes_per_step:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before step(), "
                f"got {passes} times; increase backward_passes_per_step to accumulate them."
            )
        self._hvdtrain_passes[id(parameter)] = passes
        if passes == self.backward_passes_per_step and not self._hvdtrain_alone:
            self._hvdtrain_buckets.ready(parameter)

    def synchronize(self) -> None:
        """Wait until the gradients are reduced."""
        if not self._hvdtrain_alone:
            self._hvdtrain_watch()
            self._hvdtrain_buckets.finish()
        self._hvdtrain_passes.clear()
        self._hvdtrain_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` not synchronize within the ``with`` block.

        Use this if ``synchronize()`` was called before.
        """
        if self._hvdtrain_is_adasum:
            raise AssertionError("skip_synchronize is not supported with op=Adasum.")
        self._hvdtrain_skips = True
        try:
            yield
        finally:
            self._hvdtrain_skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are added up before a reduction."""
        self.backward_passes_per_step = passes
        self._hvdtrain_passes.clear()

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Reset the gradients. Gradients that were computed since the last step are discarded."""
        self._hvdtrain_forget()
        super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def _hvdtrain_forget(self) -> None:
        if not self._hvdtrain_alone:
            self._hvdtrain_buckets.reset()
        self._hvdtrain_passes.clear()

    def load_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Load the optimizer's state.

        Gradients that were computed since the last step are discarded.
        """
        self._hvdtrain_forget()
        self._hvdtrain_synchronized = False
        super().load_state_dict(*arguments, **options)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer. All ranks must do this between the same two steps."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if hasattr(self, "_hvdtrain_buckets"):
            self._hvdtrain_watch()


def _before_step(optimizer: Any, arguments: Any, options: Any) -> Any:
    """Reduce the gradients before a step.

    If ``step`` gets a closure, return a new closure that computes the gradients and reduces them.
    """
    if optimizer._hvdtrain_skips:
        optimizer._hvdtrain_synchronized = False
        return None
    closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
    if closure is None:
        if optimizer._hvdtrain_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(), so it reduces the gradients again",
                stacklevel=4,
            )
        optimizer.synchronize()
        optimizer._hvdtrain_synchronized = False
        return None

    def synchronized_closure() -> Any:
        loss = closure()
        optimizer.synchronize()
        optimizer._hvdtrain_synchronized = False
        return loss

    return (arguments[0], synchronized_closure), {}


class _AdasumOfChanges:
    """Combines, with Adasum, the changes that the step of each rank makes to the parameters."""

    def __init__(self, parameters: Callable[[], list[Any]], process_set: ProcessSet) -> None:
        self._parameters = parameters
        self._process_set = process_set
        self._before: list[Any] = []

    def begin(self) -> None:
        """Copy the parameters before a step."""
        self._before = [p.detach().clone() for p in self._trained()]

    def finish(self) -> None:
        """Replace the changes that this rank's step made with the combined changes of all ranks."""
        parameters = self._trained()
        changes = [array_of(p.detach() - old) for p, old in zip(parameters, self._before)]
        how: Any = {"prescale": 1.0, "postscale": 1.0, "name": "changes of parameters"}
        engine = self._process_set.collectives
        combined = calls.run(lambda: reduce_arrays(engine(), changes, "adasum", **how))
        with torch.no_grad():
            for parameter, old, change in zip(parameters, self._before, combined):
                parameter.copy_(old + tensor_of(change, parameter))

    def _trained(self) -> list[Any]:
        return [p for p in self._parameters() if p.requires_grad]


def _names_of(optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None) -> dict[Any, str]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"parameter {n}" for n, p in enumerate(parameters)}
    pairs: Sequence[Any] = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters must be pairs of name and parameter, such as "
            f"model.named_parameters(), got {type(pairs[0]).__name__}."
        )
    names = [name for name, _ in pairs]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Names in named_parameters must be unique, got {duplicates} repeatedly.")
    known = {parameter: name for name, parameter in pairs}
    if missing := sum(p not in known for p in parameters):
        raise ValueError(f"named_parameters lacks {missing} of the optimizer's parameters.")
    return known
