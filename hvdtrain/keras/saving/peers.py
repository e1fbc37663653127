"""The ranks beside this one, as a ``CheckpointSession`` deals with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.keras.epoch_iterator import EpochIterator
from hvdtrain.keras.saving.worker_position import WorkerPosition

__all__ = ["Peers"]


class Peers:
    """Ranks that make each step together, and ask each other by collectives: nothing else to do.

    Where each goes its own way another class takes the place of this one.
    """

    def open(self, epochs: EpochIterator) -> None:
        """Call before training begins; ``epochs`` is where this rank stands in its data."""

    def received(self, own: int) -> int:
        """The signal that this rank acts on.

        Args:
            own: One that has come to it, or 0.
        """
        return own

    @property
    def ready(self) -> bool:
        """Whether there is a checkpoint to be had after the step just done."""
        return True

    @property
    def joined(self) -> bool:
        """Whether the model is the same on all ranks now, so that it can be saved as it is."""
        return True

    def join(self) -> None:
        """Make it the same, as it must be saved now; collective."""

    def begin_epoch(self, epoch: int) -> None:
        """Call when an epoch begins, and a checkpoint has been restored if there was one."""

    def collect(self) -> Sequence[WorkerPosition]:
        """On the chief give the model what is to be saved; where the others stand then."""
        return ()

    def were_behind(self, epoch: int) -> bool:
        """Whether some had not come to ``epoch`` when training began."""
        return False

    def until_all_have_ended(self, *, stop: bool) -> Iterator[None]:
        """Call after this rank's last step; yields now and then as long as others train.

        Args:
            stop: Whether they are to end as well.
        """
        return iter(())
