"""The other ranks for checkpoints, where each trains by itself for some steps."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.keras.local_sgd.weight_averaging import WeightAveraging
from hvdtrain.keras.saving.peers import Peers

__all__ = ["LocalPeers"]


class LocalPeers(Peers):
    """A checkpoint waits for the end of a round, so that it changes nothing, if it can wait.

    Args:
        averaging: Knows when that is.
        join: Ends a round now, between two steps.
    """

    def __init__(self, averaging: WeightAveraging, join: Callable[[], None]) -> None:
        self._averaging = averaging
        self._join = join

    @property
    def joined(self) -> bool:
        return self._averaging.joined

    def join(self) -> None:
        self._join()
