"""Allreduce over one communicator whose result doesn't depend on how MPI does it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdtrain.collectives.fusion import Scratch, split_evenly
from hvdtrain.collectives.interface import ReduceOp
from hvdtrain.collectives.kernels import accumulator_dtype, combine, finish

__all__ = ["DeterministicAllreduce"]

# Up to here sending everything to everyone costs less than a second round.
SMALL_BYTES = 16384


class DeterministicAllreduce:
    """Allreduce of flat arrays over one communicator, combined in rank order, bitwise equal.

    ``MPI_Allreduce`` promises neither, and knows no bfloat16. Here each rank gets its share of
    every contribution (alltoall), combines it, and gives the result to all (allgather): as many
    bytes as MPI's own ring algorithms. Small arrays go to everyone at once.
    """

    def __init__(self, mpi: ModuleType, comm: Any) -> None:
        self._mpi = mpi
        self.comm = comm
        self._size: int = comm.Get_size()
        self._rank: int = comm.Get_rank()
        self._scratch = Scratch()

    def run(self, data: np.ndarray, out: np.ndarray, op: ReduceOp, ranks: int) -> None:
        """Combine ``data`` of all ranks into ``out``, both flat and of one type.

        ``ranks`` is what ``op="average"`` divides by.
        """
        wide = accumulator_dtype(data.dtype)
        small = data.nbytes * self._size <= SMALL_BYTES
        parts = ((0, data.size),) * self._size if small else split_evenly(data.size, self._size)
        start, stop = parts[self._rank]
        mine = stop - start
        received = self._scratch.take("received", data.dtype, mine * self._size)
        if small:
            self._allgather_small(data, received)
        else:
            self._alltoall(data, received, parts)
        accumulator = self._scratch.take("accumulator", wide, mine)
        contributions = [received[r * mine : (r + 1) * mine] for r in range(self._size)]
        combine(contributions, op, accumulator, self._scratch.take("widened", wide, mine))
        finish(accumulator, op, ranks)
        np.copyto(out[start:stop], accumulator, casting="unsafe")
        if not small:
            self._allgather_parts(out, parts)

    def _allgather_small(self, data: np.ndarray, received: np.ndarray) -> None:
        byte = self._mpi.BYTE
        self.comm.Allgather([data.view(np.uint8), byte], [received.view(np.uint8), byte])

    def _alltoall(
        self, data: np.ndarray, received: np.ndarray, parts: Sequence[tuple[int, int]]
    ) -> None:
        item, byte = data.dtype.itemsize, self._mpi.BYTE
        start, stop = parts[self._rank]
        mine = (stop - start) * item
        self.comm.Alltoallv(
            [
                data.view(np.uint8),
                [(b - a) * item for a, b in parts],
                [a * item for a, _ in parts],
                byte,
            ],
            [
                received.view(np.uint8),
                [mine] * self._size,
                [r * mine for r in range(self._size)],
                byte,
            ],
        )

    def _allgather_parts(self, out: np.ndarray, parts: Sequence[tuple[int, int]]) -> None:
        item, byte = out.dtype.itemsize, self._mpi.BYTE
        self.comm.Allgatherv(
            self._mpi.IN_PLACE,
            [
                out.view(np.uint8),
                [(b - a) * item for a, b in parts],
                [a * item for a, _ in parts],
                byte,
            ],
        )
