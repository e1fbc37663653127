"""The check that all ranks were told the same settings, where they must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.errors import MismatchError

__all__ = ["check_in_common"]


def check_in_common(everyone: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks were told the same; with the same result on all of them.

    Args:
        everyone: ``Settings.in_common`` of each rank, in their order.

    Raises:
        MismatchError: They were not; names the first variable that differs, and two ranks.
    """
    for variable, first in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs[variable] != first:
                raise MismatchError(
                    f"{variable} is {first} on rank 0 and {theirs[variable]} on rank {rank}, and "
                    "all ranks must train in one way. Give it as a flag of hvdtrain run, or set it "
                    f"for all ranks: mpirun -x {variable} passes it on to other hosts."
                )
