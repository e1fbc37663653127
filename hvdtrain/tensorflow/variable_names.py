"""Names of variables and tensors, so that ranks can compare them.

TensorFlow and Keras count the layers that a process has made (dense, dense_1, ...), and ranks need
not have made as many of anything before: the same model has other numbers there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = [
    "counted_anew",
    "member_name",
    "operation_label",
    "variable_label",
    "variable_name",
    "without_counts",
]

_PART = re.compile(r"([^/:]+?)(?:_(\d+))?(?=[/:]|$)")


def variable_name(variable: Any) -> str:
    """Return what an error calls a variable: Keras' path, or TensorFlow's name; a text as it is."""
    if isinstance(variable, str):
        return variable
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor")


def variable_label(variable: Any) -> str:
    """``variable_name`` for what ranks compare: they need not have made as many layers before."""
    return without_counts(variable_name(variable))


def member_name(name: str | None, which: int | str) -> str | None:
    """The name of an operation that is part of a named one."""
    return None if name is None else f"{name}_{which}"


def operation_label(what: str, name: str | None, tensors: Sequence[tf.Tensor]) -> str:
    """Return what an error calls an operation of the kind ``what``: the name that it was given.

    Without one, in a graph, the names of what it takes stand for it.
    """
    if name is not None:
        return name
    if tf.executing_eagerly():
        return ""
    names = [without_counts(tensor.name.partition(":")[0]) for tensor in (tensors[0], tensors[-1])]
    return f"{what} of {' to '.join(dict.fromkeys(names))}"


def without_counts(name: str) -> str:
    """``name`` without numbers, for a label: sgd_3/dense_7_kernel_momentum is sgd/dense_kernel_...

    Keras calls an optimizer's variables by those that they belong to.
    """
    return re.sub(r"_\d+(?=[_/:]|$)", "", name)


def counted_anew(names: Sequence[str]) -> list[str]:
    """``names`` as a process would have them that had made nothing else before.

    What has a smaller number than another keeps one, so that an exchange of the two still shows:
    dense_7, dense_9 is dense, dense_1; and dense_9, dense_7 is dense_1, dense.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for part in _PART.finditer("/".join(names)):
        numbers[part[1]].add(_number(part))
    places = {base: {n: i for i, n in enumerate(sorted(found))} for base, found in numbers.items()}

    def anew(part: re.Match[str]) -> str:
        place = places[part[1]][_number(part)]
        return f"{part[1]}_{place}" if place else part[1]

    return [_PART.sub(anew, name) for name in names]


def _number(part: re.Match[str]) -> int:
    return -1 if part[2] is None else int(part[2])
