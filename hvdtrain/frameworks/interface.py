"""The functions that gradients and the trainer need from TensorFlow, PyTorch or JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import HvdtrainError

__all__ = ["Arrays", "DeviceReductions", "Framework", "SparseRows"]

Arrays = Sequence[np.ndarray]
Tensor = Any  # a tensor of TensorFlow, PyTorch or JAX
Shape = tuple[int | None, ...]


class SparseRows(Protocol):
    """Functions for gradients that contain only some rows, such as ``tf.IndexedSlices``."""

    def is_sparse(self, gradient: Any) -> bool:
        """Return whether a gradient contains only some rows."""

    def add_duplicates(self, gradient: Any) -> Any:
        """Add up the rows that have the same index, so that each row is sent only once.

        This changes the update of most Keras optimizers. For example, if a row occurs twice, Adam
        would square the two gradients separately.
        """

    def split(self, gradient: Any) -> tuple[Tensor, Tensor]:
        """Return the rows of a sparse gradient, and their indices."""

    def join(self, rows: Tensor, indices: Tensor, like: Any) -> Any:
        """Return a sparse gradient of the same variable as the gradient ``like``."""


class DeviceReductions(Protocol):
    """Reductions on devices, as ``hvdtrain.frameworks.tensorflow.device_collectives`` offers."""

    def supports(self, tensors: Any) -> bool:
        """Return whether tensors can be reduced on devices."""

    def allreduce(
        self,
        tensors: Any,
        op: ReduceOp,
        *,
        name: str,
        sent_as: Any = None,
        before: Callable[[], object] | None = None,
        after: Callable[[bool, np.ndarray], None] | None = None,
    ) -> list[Tensor]:
        """Reduce tensors of one type over all ranks."""

    def cause_of(self, error: Any) -> HvdtrainError | None:
        """Return the communication error that caused an error of the framework, or None."""


class Framework(Protocol):
    """A framework. The modules ``hvdtrain.frameworks.<name>.tensors`` implement it."""

    # the exceptions behind which the framework hides an error that a function of ``run_on_host``
    # raises in compiled code
    ERRORS: tuple[type[Exception], ...]
    # functions for sparse gradients, or None if all gradients are dense
    SPARSE_ROWS: SparseRows | None

    def run_on_host(
        self,
        function: Callable[..., Arrays],
        tensors: Sequence[Tensor],
        shapes: Sequence[Any],
        types: Sequence[Any] | None = None,
    ) -> list[Tensor]:
        """Run a NumPy function on tensors, immediately or as a part of the code that is compiled.

        The function may call collectives. In compiled code, functions run in the order in which
        they were added. Gradients don't flow through the function.

        Args:
            function: Function that takes an array for each tensor and returns a sequence of arrays.
            tensors: Arguments of the function.
            shapes: Static shapes of the results.
            types: NumPy types of the results. By default, each result has the type of the tensor at
                the same position in ``tensors``.
        """

    def uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function so that it runs as Python code, even if compiled code calls it.

        PyTorch would compile the function together with its caller. TensorFlow and JAX only trace
        such a function, and return it unchanged.
        """

    def runs_later(self) -> bool:
        """Return whether operations are added to a graph, which runs some of them in parallel."""

    def array_of(self, tensor: Tensor) -> np.ndarray:
        """Return the values of a tensor as a NumPy array, without a copy if possible."""

    def to_tensor(self, value: Any) -> Tensor:
        """Return a number, an array, a variable or a sparse gradient as a tensor."""

    def scalar(self, value: Any, like: Tensor) -> Tensor:
        """Return a number or a scalar tensor as a tensor with the type of ``like``."""

    def scaled(self, gradient: Any, factor: Any) -> Any:
        """Multiply a gradient by a number or a scalar tensor. Sparse gradients stay sparse.

        A factor of 0 gives zeros, even for NaN and infinity.
        """

    def numpy_type(self, tensor: Tensor) -> np.dtype:
        """Return the NumPy type of a tensor's values."""

    def static_shape(self, tensor: Tensor) -> Shape | None:
        """Return the shape of a tensor, with None for an unknown size or an unknown shape."""
