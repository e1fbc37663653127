"""Checks that all ranks have the same gradients, and that gradients are finite."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import MismatchError, NonFiniteError
from hvdtrain.frameworks.interface import Framework

__all__ = [
    "NO_GRADIENT",
    "Signature",
    "Signatures",
    "describe_non_finite",
    "is_sparse",
    "kind",
    "known_bytes",
    "name_non_finite",
    "raise_non_finite",
]

NO_GRADIENT = "None"


@dataclasses.dataclass(frozen=True)
class Signature:
    """A description of the gradients of a step, which must be the same on all ranks."""

    # Names of the variables. Numbers in them are replaced, so that names don't differ by rank.
    names: tuple[str, ...]
    # kind, dtype and shape of each gradient: dense, rows of ``tf.IndexedSlices`` (with the shape of
    # a row), or ``NO_GRADIENT``
    kinds: tuple[str, ...]

    @property
    def missing(self) -> str:
        """A text that lists the variables without a gradient. Empty if all variables have one."""
        names = [name for name, kind in zip(self.names, self.kinds) if kind == NO_GRADIENT]
        return f"None for {', '.join(names[:5])}" if names else ""

    def call_name(self, what: str) -> str:
        """Return the name of the reduction of these gradients, for error messages."""
        return f"{what}s, {self.missing}" if self.missing else f"{what}s"

    def kinds_by_name(self) -> dict[str, str]:
        """Return kinds of gradients by name. ``#2`` is appended to repeated names."""
        kinds: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for name, kind in zip(self.names, self.kinds):
            counts[name] += 1
            kinds[name if counts[name] == 1 else f"{name}#{counts[name]}"] = kind
        return kinds


class Signatures:
    """Compares signatures between ranks. Each signature is compared only once."""

    def __init__(self) -> None:
        self._agreed: set[Signature] = set()

    def agree(self, collectives: Engine, signature: Signature) -> None:
        """Check that all ranks have the same gradients.

        All ranks must call this. A signature that has been compared before is not compared again.

        Raises:
            MismatchError: If the gradients differ.
        """
        if signature in self._agreed:
            return
        kinds = signature.kinds_by_name()
        # Exchange digests first: the names of a thousand ranks would be megabytes.
        digest = hashlib.sha256(repr(list(kinds.items())).encode()).hexdigest()
        # With run_eagerly, one rank may call this in a later step than the others.
        digests = collectives.allgather_object(
            digest, name="gradient signatures", note=signature.missing
        )
        if len(set(digests)) > 1:
            everyone = collectives.allgather_object(kinds, name="gradients that differ")
            rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
            raise MismatchError(_mismatch_text(everyone[0], rank, everyone[rank]))
        self._agreed.add(signature)


def _mismatch_text(first: dict[str, str], rank: int, other: dict[str, str]) -> str:
    differences = [
        f"{name} is {first.get(name, 'absent')} on rank 0 and {other.get(name, 'absent')} on "
        f"rank {rank}"
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    shown = "; ".join(differences[:5]) or "they have a different order"
    return (
        f"The gradients of rank 0 and rank {rank} differ: {shown}. All ranks must train the same "
        "variables with the same loss."
    )


def is_sparse(gradient: Any, framework: Framework) -> bool:
    """Return whether a gradient contains only some rows."""
    return framework.SPARSE_ROWS is not None and framework.SPARSE_ROWS.is_sparse(gradient)


def kind(gradient: Any, framework: Framework) -> str:
    """Describe a gradient, which may be sparse or None, for a ``Signature``."""
    if gradient is None:
        return NO_GRADIENT
    if framework.SPARSE_ROWS is not None and framework.SPARSE_ROWS.is_sparse(gradient):
        rows, _ = framework.SPARSE_ROWS.split(gradient)
        return f"rows {framework.numpy_type(rows).name} {tuple(rows.shape[1:])}"
    return f"dense {framework.numpy_type(gradient).name} {framework.static_shape(gradient)}"


def known_bytes(gradient: Any, framework: Framework) -> int:
    """Return the size of a dense gradient in bytes. 0 if the size is unknown."""
    if gradient is None or is_sparse(gradient, framework):
        return 0
    shape = framework.static_shape(gradient)
    if shape is None or None in shape:
        return 0
    return math.prod(size or 0 for size in shape) * framework.numpy_type(gradient).itemsize


def name_non_finite(names: Sequence[str], arrays: Sequence[np.ndarray]) -> list[str]:
    """Describe the arrays with NaN or infinity, such as ``["kernel (NaN)", "bias (infinity)"]``."""
    nan = [bool(np.isnan(array).any()) for array in arrays]
    return describe_non_finite(names, nan, [not np.isfinite(array).all() for array in arrays])


def describe_non_finite(
    names: Sequence[str], nan: Sequence[bool], infinite: Sequence[bool]
) -> list[str]:
    """Return texts such as ``"kernel (NaN)"`` for the names whose flags are set."""
    return [
        f"{name} ({'NaN' if is_nan else 'infinity'})"
        for name, is_nan, is_infinite in zip(names, nan, infinite)
        if is_nan or is_infinite
    ]


def raise_non_finite(collectives: Engine, bad: Sequence[str], what: str = "gradient") -> NoReturn:
    """Raise an error on all ranks that lists the gradients with NaN or infinity."""
    everyone = collectives.allgather_object(list(bad[:5]), name=f"non-finite {what}s")
    causes = [f"{', '.join(names)} on rank {rank}" for rank, names in enumerate(everyone) if names]
    raise NonFiniteError(
        f"A {what} is not finite: "
        + ("; ".join(causes) or "the sum over all ranks overflowed")
        + ". Lower the learning rate, clip gradients or check the data of that rank; "
        "HVDTRAIN_NON_FINITE=ignore allows such values."
    ) from None
