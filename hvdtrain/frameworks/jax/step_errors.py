"""Errors in callbacks of compiled steps. They are raised after the step.

A step of Keras' JAX trainer receives the model's only values, and JAX frees them. If the step
failed, the model would lose its values. So a step with an error completes and returns the values
that it received. Its remaining callbacks, and those of steps that were started meanwhile, do
nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

__all__ = ["StepErrors", "errors", "is_traced"]

Host = Callable[..., list[np.ndarray]]
State = tuple[Sequence[Any], ...]


class StepErrors:
    """Keeps the first error in a callback of a step.

    The attributes are read in the threads in which JAX runs callbacks.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._keeps = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the errors of callbacks that are traced in the ``with`` block."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def guarded(self, host: Host, results: Sequence[jax.ShapeDtypeStruct]) -> Host:
        """Return a callback that calls ``host``, and returns zeros after an error.

        Outside of ``kept``, the result is ``host`` itself.
        """
        if not self._keeps:
            return host

        def run(*arrays: Any) -> list[np.ndarray]:
            if self._error is None:
                try:
                    return host(*arrays)
                except Exception as error:
                    # The frames refer to arrays that are only valid during the callback.
                    traceback.clear_frames(error.__traceback__)
                    self._error = error
            return [np.zeros(result.shape, result.dtype) for result in results]

        return run

    def unless_failed(self, before: State, after: State) -> State:
        """Return the state after a step, or the state before it if one of its callbacks failed.

        Call this at the end of a step that is traced with ``kept``.

        Raises:
            Exception: The error of a step that is not compiled.
        """
        if not is_traced():
            self.wait()
            return after
        flag = jax.ShapeDtypeStruct((), np.bool_)
        failed = io_callback(lambda: np.bool_(self._error is not None), flag, ordered=True)
        return tuple(
            [jnp.where(failed, old, new) for old, new in zip(olds, news, strict=True)]
            for olds, news in zip(before, after)
        )

    def check(self) -> None:
        """Raise the error of a step if it is known already."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until the callbacks of all steps that this thread has started have ended.

        Raises:
            Exception: The error of a step.
        """
        jax.effects_barrier()
        self.check()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise the error of a step at the end of the ``with`` block, or earlier."""
        try:
            yield
            self.wait()
        finally:
            # Steps that were started after the failed one must still find the error.
            with suppress(Exception):
                jax.effects_barrier()
            self._error = None


errors = StepErrors()


def is_traced(values: Sequence[Any] = ()) -> bool:
    """Return whether JAX traces a function at the moment, with these values or without them."""
    return any(isinstance(value, jax.core.Tracer) for value in (*values, jnp.zeros(())))
