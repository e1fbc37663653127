"""Names of variables that ranks can compare.

TensorFlow and Keras number the layers of a process (dense, dense_1, ...). If ranks have created
different numbers of layers before, the names in the same model differ between ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

__all__ = [
    "member_name",
    "renumbered",
    "variable_label",
    "variable_name",
    "without_counts",
]

_PART = re.compile(r"([^/:]+?)(?:_(\d+))?(?=[/:]|$)")


def variable_name(variable: Any) -> str:
    """Return the path of a Keras variable, the name of a TensorFlow variable, or a given str."""
    if isinstance(variable, str):
        return variable
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor")


def variable_label(variable: Any) -> str:
    """Return the name of a variable without the numbers that TensorFlow and Keras add."""
    return without_counts(variable_name(variable))


def member_name(name: str | None, member: int | str) -> str | None:
    """Return the name of one tensor or step of an operation; None if it is unnamed."""
    return None if name is None else f"{name}_{member}"


def without_counts(name: str) -> str:
    """Remove numbers from a name: ``sgd_3/dense_7_kernel`` becomes ``sgd/dense_kernel``."""
    return re.sub(r"_\d+(?=[_/:]|$)", "", name)


def renumbered(names: Sequence[str]) -> list[str]:
    """Renumber names as if the process had created no other layers.

    The order of the numbers stays the same, so that swapped variables can be noticed: ``dense_7,
    dense_9`` becomes ``dense, dense_1``, and ``dense_9, dense_7`` becomes ``dense_1, dense``.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for part in _PART.finditer("/".join(names)):
        numbers[part[1]].add(_number(part))
    order = {base: {n: i for i, n in enumerate(sorted(used))} for base, used in numbers.items()}

    def renumber(part: re.Match[str]) -> str:
        number = order[part[1]][_number(part)]
        return f"{part[1]}_{number}" if number else part[1]

    return [_PART.sub(renumber, name) for name in names]


def _number(part: re.Match[str]) -> int:
    return -1 if part[2] is None else int(part[2])
