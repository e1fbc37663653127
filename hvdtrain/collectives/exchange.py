"""The exchange between ranks once each of them is in an operation: calls first, then data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from hvdtrain.collectives.calls import Call, Calls, as_bytes, row_bytes
from hvdtrain.collectives.fusion import empty_outputs, plan_fusion, split_evenly
from hvdtrain.collectives.interface import ReduceOp
from hvdtrain.collectives.join import JOIN, SomeJoined, neutral, read_call, write_call
from hvdtrain.collectives.kernels import FiniteCheck, accumulator_dtype, combined
from hvdtrain.collectives.mismatch import explain
from hvdtrain.collectives.rank_state import RankState
from hvdtrain.collectives.sections import RAISED, RanksRaised
from hvdtrain.collectives.transport import Reduction, Transport
from hvdtrain.collectives.wire_format import wire_format
from hvdtrain.errors import MismatchError

__all__ = ["Exchange"]

# Before the reason of a rank that left a section; no call's text begins with it.
_REASON = "\0"


class Exchange:
    """Agrees with the other ranks on a call, and exchanges by a transport what it needs.

    Every method is collective, and is called within an operation of the engine.

    Args:
        transport: Carries the bytes; open.
        ranks: Which ranks there are.
    """

    def __init__(self, transport: Transport, ranks: RankState) -> None:
        self._transport, self._ranks = transport, ranks

    def agree(self, call: Call) -> None:
        """Return when every rank has made the same call.

        Raises:
            MismatchError: On every rank, where they differ.
            SomeJoined: On every rank, where some have joined and all others made the same call.
            RanksRaised: On every rank, where some leave a section by an error.
        """
        if not self._transport.agree(call):
            self._raise_mismatch(call)

    def counts(self, call: Call, counts: Sequence[int]) -> np.ndarray:
        """Agree, then return the counts of all ranks, int64 of shape (size, len(counts))."""
        self.agree(call)
        return self._gather_counts(counts)

    def parts(self, call: Call, data: np.ndarray) -> list[np.ndarray]:
        """Agree, then return the bytes of each rank."""
        self.agree(call)
        return self._gather_parts(data)

    def reduce(
        self,
        call: Call,
        arrays: Sequence[np.ndarray],
        op: ReduceOp,
        require_finite: bool,
        wire: str = "none",
    ) -> tuple[Sequence[np.ndarray], FiniteCheck | None]:
        """Agree, and combine arrays of one type; also what is known of whether all is finite."""
        dtype, shapes = arrays[0].dtype, tuple(array.shape for array in arrays)
        transport = self._transport
        chunk_items = transport.chunk_bytes // accumulator_dtype(dtype).itemsize
        layout = plan_fusion(shapes, dtype.itemsize, chunk_items, transport.shares)
        outputs, flat = empty_outputs(transport.take_buffer(layout.output_bytes), layout, dtype)
        flat_inputs = [array.reshape(-1) for array in arrays]
        finite = FiniteCheck(dtype) if require_finite else None
        asked = Reduction(call, layout, flat_inputs, flat, op, finite, wire_format(wire))
        if not transport.allreduce(asked):
            self._raise_mismatch(call)
        return outputs, finite

    def reduce_rows(self, call: Call, array: np.ndarray, op: ReduceOp) -> np.ndarray:
        """Agree, and combine this rank's share of the rows from what all ranks have of them."""
        self.agree(call)
        rows = split_evenly(array.shape[0], self._ranks.size)
        start, stop = rows[self._ranks.rank]
        mine = array[start:stop]
        received = np.empty((self._ranks.size, mine.size), array.dtype)
        if array.size:
            self._transport.alltoall_bytes(
                as_bytes(array),
                [(b - a) * row_bytes(array) for a, b in rows],
                as_bytes(received),
                [mine.nbytes] * self._ranks.size,
            )
        total = combined(list(received), op, self._ranks.size)
        return total.astype(array.dtype, copy=False).reshape(mine.shape)

    def call_of_others(self, call: Call, joined: bool, calls: Calls) -> Call:
        """Return what the ranks call that have not joined, after an attempt that found some have.

        Args:
            call: What this rank calls.
            joined: Whether this one is among those that have.
            calls: Has the call that is returned.
        """
        self._transport.start_over()
        mine = np.empty(0, np.uint8) if joined else write_call(call)
        parts = self.parts(calls.get(JOIN, "call of others", ()), mine)
        return read_call(next(part for part in parts if part.size), calls)

    def add_neutral(self, call: Call) -> None:
        """Take part in an operation of the other ranks with what changes nothing in its result."""
        if call.kind != "allreduce":
            self.parts(call, np.empty(0, np.uint8))
            return
        op, name, shapes, *form = call.detail
        # This rank may have the share of the result that is not finite.
        self.reduce(call, neutral(op, np.dtype(name), shapes), op, True, *form)

    def _gather_counts(self, counts: Sequence[int]) -> np.ndarray:
        mine = np.array(counts, np.int64)
        everyone = np.empty((self._ranks.size, mine.size), np.int64)
        each = [mine.nbytes] * self._ranks.size
        self._transport.gather_bytes(as_bytes(mine), as_bytes(everyone), each)
        return everyone

    def _gather_parts(self, data: np.ndarray) -> list[np.ndarray]:
        counts = self._gather_counts([data.size])[:, 0].tolist()
        everything = np.empty(sum(counts), np.uint8)
        self._transport.gather_bytes(data, everything, counts)
        return np.split(everything, np.cumsum(counts)[:-1])

    def _raise_mismatch(self, call: Call) -> NoReturn:
        """Say what each rank has called; all ranks raise the same, and may go on."""
        mine = _REASON + call.note if call.kind == RAISED else call.text
        parts = self._gather_parts(np.frombuffer(mine.encode(), np.uint8))
        texts = [part.tobytes().decode() for part in parts]
        numbers = [self._ranks.numbers[member] for member in self._ranks.members]
        reasons = {
            number: text.removeprefix(_REASON)
            for number, text in zip(numbers, texts)
            if text.startswith(_REASON)
        }
        if reasons:
            self._transport.start_over()
            raise RanksRaised(reasons)
        joined = [rank for rank, text in enumerate(texts) if text == JOIN]
        if joined and len(set(texts)) == 2:
            raise SomeJoined(joined)
        self._transport.start_over()
        raise MismatchError(explain(texts, numbers))
