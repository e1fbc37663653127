"""Options of how gradients are combined, beyond what every job does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.gradients.array_reduction import TensorOp
from hvdtrain.gradients.compression import Compression, Compressor

__all__ = ["ExchangeOptions", "Groups", "ReduceOptions"]

Groups = int | Sequence[Sequence[Any]] | None
"""A number of groups, or lists of variables; None for one group."""


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of ``gradients.allreduce.exchange``.

    Attributes:
        op: How they are combined.
        compression: The type in which they travel.
        prescale: Multiplies what goes in.
        postscale: Multiplies what comes out.
        device_dense: Where the results of tensors are to be.
        device_sparse: Where the results of ``tf.IndexedSlices`` are to be.
    """

    op: TensorOp = "average"
    compression: type[Compressor] = Compression.none
    prescale: float = 1.0
    postscale: float = 1.0
    device_dense: str = ""
    device_sparse: str = ""


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """Options of a ``GradientReducer``.

    Attributes:
        non_finite: ``"error"`` raises on every rank when a gradient holds NaN or infinity and
            names rank and variable; ``"ignore"`` lets it through.
        wire: The form in which float32 crosses between hosts; see ``wire_format``.
        powersgd_rank: Send gradients of variables as matrices of this rank, by PowerSGD; 0 to send
            them whole.
        unchecked: Combine them in this way, as Horovod does: differentiable, and without a look at
            names and values. None to compare the ranks' variables, and see that values are finite.
        sparse_as_dense: Make tensors of ``tf.IndexedSlices`` first.
        groups: Combine gradients in so many groups, or those of each list of variables together.
        scale_local: Divide the gradients of local variables by the number of ranks.
        what: What errors call that which is combined: ``"gradient"``, or ``"weight"``.

    Raises:
        ValueError: ``groups`` is something else.
    """

    non_finite: str = "error"
    wire: str = "none"
    powersgd_rank: int = 0
    unchecked: ExchangeOptions | None = None
    sparse_as_dense: bool = False
    groups: Groups = None
    scale_local: bool = True
    what: str = "gradient"

    def __post_init__(self) -> None:
        lists = isinstance(self.groups, Sequence) and not isinstance(self.groups, str)
        if not (self.groups is None or lists or (type(self.groups) is int and self.groups > 0)):
            raise ValueError(
                f"Received groups={self.groups!r}; expected a number of groups above 0, or a list "
                "of lists of variables."
            )

    def divide(
        self,
        places: Sequence[int],
        variables: Sequence[Any],
        sizes: Sequence[int],
        bucket_bytes: int,
    ) -> list[list[int]]:
        """Put the places of those variables that have gradients into groups, none of it empty.

        Where nothing is said of groups they are buckets, of which the last variables, whose
        gradients come first, make the first.

        Args:
            places: Where among ``variables`` those are that have gradients.
            variables: All of them.
            sizes: Bytes of the gradient at each place; 0 where that isn't known.
            bucket_bytes: A bucket is complete when it holds so many; 0 for one of all.
        """
        if self.groups is None:
            return _buckets(places, sizes, bucket_bytes)
        if isinstance(self.groups, int):
            count = min(self.groups, len(places))
            ends = [len(places) * (n + 1) // count for n in range(count)]
            return [list(places[a:b]) for a, b in zip([0, *ends], ends)]
        left = {id(variables[n]): n for n in places}
        groups = [[left.pop(id(v)) for v in group if id(v) in left] for group in self.groups]
        return [group for group in (*groups, *([n] for n in left.values())) if group]


def _buckets(places: Sequence[int], sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    if not bucket_bytes or not places:
        return [list(places)] if places else []
    buckets: list[list[int]] = [[]]
    held = 0
    for place in reversed(places):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(place)
        held += sizes[place]
    return buckets
