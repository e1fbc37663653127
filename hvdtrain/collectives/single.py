"""One process alone: every operation is a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives.calls import Call
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.collectives.transport import Reduction, Transport
from hvdtrain.errors import ConfigurationError

__all__ = ["SingleTransport"]


class SingleTransport(Transport):
    """The transport of a world of one rank; needs no MPI."""

    kind = "single"

    def agree(self, call: Call) -> bool:
        return True

    def allreduce(self, asked: Reduction) -> bool:
        for array, out in zip(asked.inputs, asked.outputs):
            np.copyto(out, array)
            if asked.finite is not None:
                asked.finite.look(out)
        return True

    def gather_bytes(self, data: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        np.copyto(out, data)

    def broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        pass

    def alltoall_bytes(
        self,
        data: np.ndarray,
        send_counts: Sequence[int],
        out: np.ndarray,
        receive_counts: Sequence[int],
    ) -> None:
        np.copyto(out, data)

    def messages(self) -> PointToPoint:
        raise ConfigurationError(
            "A process that is alone was to send messages to other ranks; expected two ranks or "
            "more. Start more with mpirun, srun or hvdtrain run."
        )

    def subset(self, ranks: Sequence[int]) -> SingleTransport:
        return SingleTransport()
