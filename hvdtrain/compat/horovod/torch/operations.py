"""Handles of asynchronous operations on PyTorch tensors, and functions for all collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain import world
from hvdtrain.compat.horovod.torch.call_queue import calls

__all__ = ["Handle", "all_of", "differentiable", "in_place", "poll", "synchronize", "waiting"]


class Handle:
    """An operation in progress.

    Pass the handle to ``synchronize``, or call it, to wait for the operation and to get its result.

    Args:
        call: Function that runs the collectives, on NumPy arrays and in a thread.
        finish: Function that converts the result of ``call`` to tensors. It runs in the thread that
            waits for the operation.
    """

    def __init__(self, call: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        world.collectives()  # raises an error here if the job has not started
        self._future = calls.add(call)
        self._finish = finish
        self._output: list[Any] = []

    def __call__(self) -> Any:
        """Wait for the operation and return its result."""
        if not self._output:
            self._output.append(self._finish(self._future.result()))
        return self._output[0]

    def then(self, finish: Callable[[Any], Any]) -> Handle:
        """Add a function to apply to the result.

        The function runs in the thread that waits for the operation.
        """
        first = self._finish
        self._finish = lambda result: finish(first(result))
        return self

    def done(self) -> bool:
        """Return whether the result is available."""
        return self._future.done()


def poll(handle: Handle) -> bool:
    """Return whether an asynchronous operation has finished."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result.

    Raises:
        MismatchError: If another rank made a different call.
        CollectiveError: If the operation failed.
    """
    return handle()


def all_of(handles: Sequence[Handle]) -> Handle:
    """Combine several handles to a handle whose result is the list of their results."""
    return Handle(lambda: None, lambda _: [handle() for handle in handles])


def in_place(start: Callable[..., Handle], what: str) -> Callable[..., Handle]:
    """Return a function like ``start`` that assigns the results to its input tensors.

    ``what`` is the first line of the new function's docstring.
    """

    @functools.wraps(start)
    def start_in_place(tensors: Any, *arguments: Any, **options: Any) -> Handle:
        def replace(outputs: Any) -> Any:
            pairs = [(tensors, outputs)] if torch.is_tensor(tensors) else zip(tensors, outputs)
            with torch.no_grad():
                for tensor, output in pairs:
                    tensor.copy_(output)
            return tensors

        return start(tensors, *arguments, **options).then(replace)

    start_in_place.__doc__ = f"{what} The arguments are as in ``{start.__name__}``."
    return start_in_place


def waiting(start: Callable[..., Handle], what: str) -> Callable[..., Any]:
    """Return a function like ``start`` that waits for the operation and returns the result.

    ``what`` is the first line of the new function's docstring.
    """

    @functools.wraps(start)
    def run(*arguments: Any, **options: Any) -> Any:
        return start(*arguments, **options)()

    run.__doc__ = f"{what} The arguments are as in ``{start.__name__}``."
    return run


class _Differentiable(torch.autograd.Function):
    """An operation whose result and gradients are each computed by a Python function."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> Any:
        ctx.backward_function = backward
        return tuple(forward(*tensors))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return None, None, *ctx.backward_function(*upstream)


def differentiable(
    forward: Callable[..., list[torch.Tensor]],
    backward: Callable[..., list[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the result of ``forward``, with ``backward`` as its gradient function."""
    outputs: Any = _Differentiable.apply(forward, backward, *tensors)
    return list(outputs)
