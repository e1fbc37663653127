"""The division of gradients into groups that are reduced together, for any framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.collectives.fusion import fill_buckets

__all__ = ["Groups", "check_groups", "divide"]

Groups = int | Sequence[Sequence[Any]] | None
"""Number of groups, or lists of variables. With None, gradients are divided into buckets."""


def check_groups(groups: Groups) -> None:
    """Raise ``ValueError`` if ``groups`` is invalid."""
    lists = isinstance(groups, Sequence) and not isinstance(groups, str)
    if not (groups is None or lists or (type(groups) is int and groups > 0)):
        raise ValueError(
            f"groups must be a positive number or a list of lists of variables, got {groups!r}."
        )


def divide(
    groups: Groups,
    indices: Sequence[int],
    variables: Sequence[Any],
    sizes: Sequence[int],
    bucket_bytes: int,
) -> list[list[int]]:
    """Divide variables into groups that are reduced together. Return the indices in each group.

    ``indices`` are the indices of the variables that have a gradient. By default, the groups are
    buckets of at least ``bucket_bytes``. The first bucket contains the last variables, because
    their gradients are computed first. ``sizes`` contains the bytes of each gradient, or 0 if
    unknown.
    """
    if groups is None:
        if not bucket_bytes or not indices:
            return [list(indices)] if indices else []
        return fill_buckets(indices, sizes, bucket_bytes)
    if isinstance(groups, int):
        count = min(groups, len(indices))
        ends = [len(indices) * (n + 1) // count for n in range(count)]
        return [list(indices[a:b]) for a, b in zip([0, *ends], ends)]
    rest = {id(variables[n]): n for n in indices}
    lists = [[rest.pop(id(v)) for v in group if id(v) in rest] for group in groups]
    return [group for group in (*lists, *([n] for n in rest.values())) if group]
