"""Join: a rank without data takes part while others go on, and adds what changes no result."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.calls import Call, Calls
from hvdtrain.collectives.interface import ReduceOp
from hvdtrain.errors import MismatchError

__all__ = ["JOIN", "SomeJoined", "check_can_join", "neutral", "read_call", "write_call"]

JOIN = "join"
# Calls that go without a part of each rank.
_WITHOUT = ("allreduce", "allgather_object")


class SomeJoined(Exception):
    """Some ranks call ``join``, and all others the same operation; raised on all alike.

    Args:
        ranks: Those that have joined.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"ranks {list(ranks)} have joined")
        self.ranks = frozenset(ranks)


def write_call(call: Call) -> np.ndarray:
    """A call as bytes, for ranks that don't know it."""
    return np.frombuffer(json.dumps([call.kind, call.name, call.detail]).encode(), np.uint8)


def read_call(data: np.ndarray, calls: Calls) -> Call:
    """Return the call of ``write_call``'s bytes."""
    kind, name, detail = json.loads(data.tobytes())
    return calls.get(kind, name, _tuples(detail))


def check_can_join(call: Call, ranks: Sequence[int]) -> None:
    """Check that an operation can be done without some ranks.

    Args:
        call: The operation.
        ranks: The ranks that have joined.

    Raises:
        MismatchError: It can't.
    """
    if call.kind not in _WITHOUT:
        raise MismatchError(
            f"Rank {', '.join(map(str, ranks))} called join, and the others {call.short_text}. "
            "Between join of the first rank and of the last all that they can do is allreduce, and "
            "with --backend nccl not even that; call the rest before, or after."
        )


def neutral(op: ReduceOp, dtype: np.dtype, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Arrays that change nothing in a reduction, but for the number of ranks in an average."""
    return [np.full(shape, _neutral_value(op, dtype), dtype) for shape in shapes]


def _neutral_value(op: ReduceOp, dtype: np.dtype) -> object:
    if op in ("sum", "average"):
        return 0
    if op == "product":
        return 1
    if dtype.kind == "b":
        return op == "min"
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op == "min" else limits.min
    return np.inf if op == "min" else -np.inf


def _tuples(value: object) -> tuple[object, ...]:
    """JSON's lists as the tuples that they were."""
    assert isinstance(value, list)
    return tuple(_tuples(entry) if isinstance(entry, list) else entry for entry in value)
