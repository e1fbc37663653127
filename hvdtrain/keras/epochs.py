"""Keras' loop over the steps of an epoch, for data that is read from any position on.

Keras counts steps from 0 and asks its iterator for one more until a number known beforehand is
reached. Here an epoch may begin in its middle, where training is resumed, and its end follows from
what is left of the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from keras.src.backend.tensorflow.trainer import TFEpochIterator

from hvdtrain.keras.data import ShardedInput
from hvdtrain.keras.data.base import Pass
from hvdtrain.keras.data.position import Position

__all__ = ["Epochs"]


class Place(NamedTuple):
    """Where in its data a training stands after a step.

    Attributes:
        position: Within a pass; None where the next epoch begins one of its own.
        epoch_step: Steps of the epoch in work that are done.
        epochs: That ended since the training began.
        passes: Begun before the one that is in work, or that comes next.
        ranks: How many ranks there were.
    """

    position: Position | None
    epoch_step: int
    epochs: int
    passes: int
    ranks: int


class Epochs:
    """Where ``fit`` stands in its data.

    Args:
        sharded: This rank's share.
        ranks: How many ranks there are.
        steps_per_epoch: As in ``fit``.
        steps_per_execution: Of the model; Keras runs so many steps in one go.
    """

    def __init__(
        self,
        sharded: ShardedInput,
        *,
        ranks: int,
        steps_per_epoch: int | None,
        steps_per_execution: int,
    ) -> None:
        self._sharded = sharded
        self._ranks = ranks
        self._steps_per_epoch = steps_per_epoch
        self._block = steps_per_execution
        self.step = 0
        """Steps since the training began, the block in work included."""
        self._epoch = 0
        self._epochs = 0  # ended
        self._passes = 0  # begun
        self._resumed: Place | None = None
        self._pass: Pass | None = None
        self._iterator: Any = None
        self._done = 0  # steps of the pass, the block in work included
        self._within = 0  # steps of the block in work, 0 between two
        self._ran_out = False  # the pass had fewer steps than it could tell

    def place(self, *, epoch_step: int) -> Place:
        """Where the data stands after the block of steps in work.

        Args:
            epoch_step: Steps of this epoch that are done; 0 where the block was its last.
        """
        within = epoch_step > 0
        goes_on = within or (self._steps_per_epoch is not None and not self.ended)
        return Place(
            position=self._pass.after(self._done) if self._pass and goes_on else None,
            epoch_step=epoch_step,
            epochs=self._epochs - within,
            passes=self._passes - goes_on,
            ranks=self._ranks,
        )

    @property
    def ended(self) -> bool:
        """Whether nothing is left of the pass."""
        return self._pass is None or self._pass.steps == self._done or self._ran_out

    def resume(self, place: Place, *, epoch: int, step: int) -> None:
        """Begin with ``epoch`` where another run had come to.

        Args:
            place: As it had been told.
            epoch: The first to run.
            step: Steps that are done since the training began.
        """
        self.step = step
        self._resumed = place._replace(position=place.position or Position(epoch=epoch))
        self._epochs, self._passes = place.epochs, place.passes
        self._sharded.catch_up(epochs=place.epochs, passes=place.passes)

    def on_epoch_begin(self, epoch: int) -> None:
        """Call before Keras' loop over the steps of ``epoch``."""
        self._epoch = epoch
        self._epochs += 1

    def run_out(self) -> None:
        """Note that the block in work was none: data of unknown length has come to its end."""
        self.step -= self._within
        self._done -= self._within
        self._within = 0
        self._ran_out = True

    def take_over(self, keras_iterator: TFEpochIterator) -> None:
        """Let ``fit``'s own iterator yield the steps of this object."""
        keras_iterator.__class__ = _EpochIterator
        keras_iterator.hvdtrain_epochs = self

    def steps(self, keras_iterator: Any) -> Iterator[tuple[int, int, Any]]:
        """First and last step of each block, and the iterator that it takes its batches from."""
        goes_on = self._steps_per_epoch is not None and not self.ended
        step = 0 if goes_on else self._begin_pass()
        assert self._pass is not None
        limit = self._steps_per_epoch
        while limit is None or step < limit:
            if self.ended:
                if limit is not None:
                    keras_iterator._interrupted_warning()
                break
            taken = self._block
            if self._pass.steps is not None:
                taken = min(taken, self._pass.steps - self._done)
            self._done += taken
            self.step += taken
            keras_iterator._steps_seen = step + self._block
            self._within = taken
            yield step, step + self._block - 1, self._iterator
            self._within = 0
            step += self._block

    def _begin_pass(self) -> int:
        """Start the next pass; returns how many steps of the epoch are done."""
        first_step = 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.position is not None:
            self._pass = self._sharded.begin(resumed.position, ranks=resumed.ranks)
            first_step = self._steps_before(resumed, self._pass.steps)
        else:
            self._pass = self._sharded.begin(Position(epoch=self._epoch))
        self._passes += 1
        self._iterator = iter(self._pass.dataset)
        self._done = 0
        self._ran_out = False
        return first_step

    def _steps_before(self, resumed: Place, left: int | None) -> int:
        """What Keras is to count as done, with the number of ranks that there is now."""
        if not resumed.epoch_step:
            return 0
        if self._steps_per_epoch is None and self._sharded.steps is not None:
            return max(0, self._sharded.steps - (left or 0))
        return -(-resumed.epoch_step * resumed.ranks // self._ranks)


class _EpochIterator(TFEpochIterator):
    """Keras' iterator, once ``take_over`` has changed its class."""

    hvdtrain_epochs: Epochs

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Any]]:
        return self.hvdtrain_epochs.steps(self)

    def _interrupted_warning(self) -> None:
        self.hvdtrain_epochs.run_out()
        super()._interrupted_warning()
