"""One process alone: every operation is a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.engine import Call, Engine, Reduction
from hvdtrain.collectives.interface import ReduceOp
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.errors import ConfigurationError

__all__ = ["SingleCollectives"]


class SingleCollectives(Engine):
    """Collectives of a world of one rank; needs no MPI."""

    kind = "single"

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, chunk_bytes=1 << 20, timeout_s=600.0)

    def messages(self) -> PointToPoint:
        raise ConfigurationError(
            "A process that is alone was to send messages to other ranks; expected two ranks or "
            "more. Start more with mpirun, srun or hvdtrain run."
        )

    def _subset(self, ranks: Sequence[int]) -> SingleCollectives:
        part = SingleCollectives()
        part.observers = self.observers
        return part

    def _agree(self, call: Call) -> None:
        pass

    def _allreduce(self, asked: Reduction) -> None:
        for array, out in zip(asked.inputs, asked.outputs):
            np.copyto(out, array)
            if asked.finite is not None:
                asked.finite.look(out)

    def _gather_words(self, words: np.ndarray) -> np.ndarray:
        return words[np.newaxis]

    def _gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        np.copyto(out, data)

    def _broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        pass

    def _reduce_scatter(
        self, array: np.ndarray, rows: Sequence[tuple[int, int]], op: ReduceOp
    ) -> np.ndarray:
        return array.copy()

    def _alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        np.copyto(out, data)
