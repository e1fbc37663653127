"""The error of gradients or weights that hold NaN or infinity, which names rank and variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import NonFiniteError

__all__ = ["describe_non_finite", "name_non_finite", "raise_non_finite"]


def name_non_finite(names: Sequence[str], arrays: Sequence[np.ndarray]) -> list[str]:
    """The names of the arrays that hold NaN or infinity, with which of them it is."""
    nan = [bool(np.isnan(array).any()) for array in arrays]
    return describe_non_finite(names, nan, [not np.isfinite(array).all() for array in arrays])


def describe_non_finite(
    names: Sequence[str], nan: Sequence[bool], infinite: Sequence[bool]
) -> list[str]:
    """The names of what holds NaN or infinity, with which of them it is."""
    return [
        f"{name} ({'NaN' if is_nan else 'infinity'})"
        for name, is_nan, is_infinite in zip(names, nan, infinite)
        if is_nan or is_infinite
    ]


def raise_non_finite(collectives: Engine, bad: Sequence[str], what: str = "gradient") -> NoReturn:
    """Tell all ranks which of this one's gradients are not finite; collective.

    ``what`` is what they are, in errors.

    Raises:
        NonFiniteError: Always; it says what is wrong on which rank.
    """
    everyone = collectives.allgather_object(list(bad[:5]), name=f"non-finite {what}s")
    found = [f"{', '.join(names)} on rank {rank}" for rank, names in enumerate(everyone) if names]
    raise NonFiniteError(
        f"A {what} is not finite: "
        + ("; ".join(found) or "the sum over all ranks overflowed")
        + ". Lower the learning rate, clip gradients or look at the data of that rank; "
        "HVDTRAIN_NON_FINITE=ignore lets such values through."
    ) from None
