"""The exchange between ranks once each of them is in an operation: calls first, then data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from hvdtrain.collectives.calls import Call, Calls, as_bytes, row_bytes
from hvdtrain.collectives.fusion import empty_outputs, plan_fusion, split_evenly
from hvdtrain.collectives.kernels import FiniteCheck, ReduceOp, accumulator_dtype, combined
from hvdtrain.collectives.rank_state import RankState
from hvdtrain.collectives.sections import RAISED, RanksRaised
from hvdtrain.collectives.transport import Reduction, Transport
from hvdtrain.collectives.wire_format import wire_format
from hvdtrain.errors import MismatchError

__all__ = ["JOIN", "Exchange", "SomeJoined", "check_can_join"]

JOIN = "join"
# Calls that go without a part of each rank.
_WITHOUT = ("allreduce", "allgather_object")
# Before the reason of a rank that left a section; no call's text begins with it.
_REASON = "\0"


class SomeJoined(Exception):
    """Some ranks call ``join``, and all others the same operation; raised on all alike.

    Args:
        ranks: Those that have joined.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"ranks {list(ranks)} have joined")
        self.ranks = frozenset(ranks)


class Exchange(RankState):
    """The part of an engine that agrees with the other ranks on a call, and exchanges its data.

    Every method is collective, and is called within an operation.

    Args:
        transport: Carries the bytes; opened for this engine.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._calls = Calls()
        self.transport = transport.open(self)

    def _agree(self, call: Call) -> None:
        """Return when every rank has made the same call.

        Raises:
            MismatchError: On every rank, where they differ.
            SomeJoined: On every rank, where some have joined and all others made the same call.
            RanksRaised: On every rank, where some leave a section by an error.
        """
        if not self.transport.agree(call):
            self._raise_mismatch(call)

    def _counts(self, call: Call, counts: Sequence[int]) -> np.ndarray:
        """Agree, then return the counts of all ranks, int64 of shape (size, len(counts))."""
        self._agree(call)
        return self._gather_counts(counts)

    def _exchange_parts(self, call: Call, data: np.ndarray) -> list[np.ndarray]:
        """Agree, then return the bytes of each rank."""
        self._agree(call)
        return self._gather_parts(data)

    def _reduce_arrays(
        self,
        call: Call,
        arrays: Sequence[np.ndarray],
        op: ReduceOp,
        require_finite: bool,
        wire: str = "none",
    ) -> tuple[Sequence[np.ndarray], FiniteCheck | None]:
        """Agree, and combine arrays of one type; also what is known of whether all is finite."""
        dtype, shapes = arrays[0].dtype, tuple(array.shape for array in arrays)
        transport = self.transport
        chunk_items = transport.chunk_bytes // accumulator_dtype(dtype).itemsize
        layout = plan_fusion(shapes, dtype.itemsize, chunk_items, transport.shares)
        outputs, flat = empty_outputs(transport.take_buffer(layout.output_bytes), layout, dtype)
        flat_inputs = [array.reshape(-1) for array in arrays]
        finite = FiniteCheck(dtype) if require_finite else None
        asked = Reduction(call, layout, flat_inputs, flat, op, finite, wire_format(wire))
        if not transport.allreduce(asked):
            self._raise_mismatch(call)
        return outputs, finite

    def _reduce_rows(self, call: Call, array: np.ndarray, op: ReduceOp) -> np.ndarray:
        """Agree, and combine this rank's share of the rows from what all ranks have of them."""
        self._agree(call)
        rows = split_evenly(array.shape[0], self.size)
        start, stop = rows[self.rank]
        mine = array[start:stop]
        received = np.empty((self.size, mine.size), array.dtype)
        if array.size:
            self.transport.alltoall_bytes(
                as_bytes(array),
                [(b - a) * row_bytes(array) for a, b in rows],
                as_bytes(received),
                [mine.nbytes] * self.size,
            )
        total = combined(list(received), op, self.size)
        return total.astype(array.dtype, copy=False).reshape(mine.shape)

    def _call_of_others(self, call: Call, joined: bool) -> Call:
        """Return what the ranks call that have not joined, after an attempt that found some have.

        Args:
            call: What this rank calls.
            joined: Whether this one is among those that have.
        """
        self.transport.start_over()
        mine = np.empty(0, np.uint8) if joined else _write_call(call)
        parts = self._exchange_parts(self._calls.get(JOIN, "call of others", ()), mine)
        return _read_call(next(part for part in parts if part.size), self._calls)

    def _add_neutral(self, call: Call) -> None:
        """Take part in an operation of the other ranks with what changes nothing in its result."""
        if call.kind != "allreduce":
            self._exchange_parts(call, np.empty(0, np.uint8))
            return
        op, name, shapes, *form = call.detail
        # This rank may have the share of the result that is not finite.
        self._reduce_arrays(call, _neutral(op, np.dtype(name), shapes), op, True, *form)

    def _gather_counts(self, counts: Sequence[int]) -> np.ndarray:
        mine = np.array(counts, np.int64)
        everyone = np.empty((self.size, mine.size), np.int64)
        each = [mine.nbytes] * self.size
        self.transport.gather_bytes(as_bytes(mine), as_bytes(everyone), each)
        return everyone

    def _gather_parts(self, data: np.ndarray) -> list[np.ndarray]:
        counts = self._gather_counts([data.size])[:, 0].tolist()
        everything = np.empty(sum(counts), np.uint8)
        self.transport.gather_bytes(data, everything, counts)
        return np.split(everything, np.cumsum(counts)[:-1])

    def _raise_mismatch(self, call: Call) -> NoReturn:
        """Say what each rank has called; all ranks raise the same, and may go on."""
        mine = _REASON + call.note if call.kind == RAISED else call.text
        parts = self._gather_parts(np.frombuffer(mine.encode(), np.uint8))
        texts = [part.tobytes().decode() for part in parts]
        numbers = [self.numbers[member] for member in self.members]
        reasons = {
            number: text.removeprefix(_REASON)
            for number, text in zip(numbers, texts)
            if text.startswith(_REASON)
        }
        if reasons:
            self.transport.start_over()
            raise RanksRaised(reasons)
        joined = [rank for rank, text in enumerate(texts) if text == JOIN]
        if joined and len(set(texts)) == 2:
            raise SomeJoined(joined)
        self.transport.start_over()
        raise MismatchError(_explain(texts, numbers))


def _explain(texts: Sequence[str], numbers: Sequence[int]) -> str:
    """The text of the error that says which rank called what.

    Args:
        texts: What each rank called.
        numbers: What errors call these ranks.
    """
    ranks_of: dict[str, list[str]] = {}
    for number, text in zip(numbers, texts):
        ranks_of.setdefault(text, []).append(str(number))
    letters = enumerate(zip(*ranks_of))
    difference = next((place for place, several in letters if len(set(several)) > 1), 0)
    calls = "; ".join(
        f"rank {', '.join(ranks)}: {_shorten(text, difference)}" for text, ranks in ranks_of.items()
    )
    return (
        f"Ranks made different calls at the same point. {calls}. Every rank must make the same "
        "calls with the same names, shapes and types in the same order."
    )


def _shorten(text: str, difference: int, limit: int = 300) -> str:
    """The beginning, and where it differs from another text if that is further on."""
    if len(text) <= limit:
        return text
    if difference < limit - 50:
        return f"{text[:limit]} …"
    return f"{text[:150]} … {text[difference - 50 : difference + 100]} …"


def _write_call(call: Call) -> np.ndarray:
    """A call as bytes, for ranks that don't know it."""
    return np.frombuffer(json.dumps([call.kind, call.name, call.detail]).encode(), np.uint8)


def _read_call(data: np.ndarray, calls: Calls) -> Call:
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


def _neutral(op: ReduceOp, dtype: np.dtype, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
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
