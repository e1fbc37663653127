"""Options for the reduction of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.gradients.buckets import Groups, check_groups, divide
from hvdtrain.gradients.ranks import Ranks

__all__ = ["ReduceOptions"]


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """Options of a ``GradientReducer``.

    Raises:
        ValueError: If ``groups`` is invalid.
    """

    # With ``"error"``, every rank raises an error if a gradient contains NaN or infinity. The error
    # names the rank and the variable. ``"ignore"`` allows such gradients.
    non_finite: str = "error"
    # name of the format in which float32 data is sent between hosts, which ``wire_format`` accepts
    wire: str = "none"
    # Rank (number of columns) of the matrices that PowerSGD sends. 0 means no compression.
    powersgd_rank: int = 0
    # Function that combines gradients instead, with the arguments gradients and ranks. Names and
    # values are then not checked.
    unchecked: Callable[[Sequence[Any], Ranks], list[Any]] | None = None
    # whether to convert ``tf.IndexedSlices`` to tensors before they are reduced
    sparse_as_dense: bool = False
    groups: Groups = None  # number of groups, or lists of variables to combine together
    # whether to divide the gradients of local variables by the number of ranks
    scale_local: bool = True
    what: str = "gradient"  # what is averaged, for error messages: ``"gradient"`` or ``"weight"``

    def __post_init__(self) -> None:
        check_groups(self.groups)

    def divide(
        self,
        indices: Sequence[int],
        variables: Sequence[Any],
        sizes: Sequence[int],
        bucket_bytes: int,
    ) -> list[list[int]]:
        """Divide variables into groups. Only the variables that have a gradient are divided.

        The function ``hvdtrain.gradients.buckets.divide`` describes the groups.
        """
        return divide(self.groups, indices, variables, sizes, bucket_bytes)
