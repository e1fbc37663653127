"""Keras' loop over the steps of an epoch, for data that is read from any position on.

Keras counts steps from 0 and asks its iterator for one more until a number known beforehand is
reached. Here an epoch may begin in its middle, where training is resumed, and its end follows from
what is left of the data.

Where ranks may be lost, what they had taken in a step is done again by the others, unless their
gradients went into it. Then the rest of the pass is shared out among those that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvdtrain.keras.data import ShardedInput
from hvdtrain.keras.data.partition import Position
from hvdtrain.keras.data.sharded_input import Pass
from hvdtrain.keras.fit_inputs import InputWait
from hvdtrain.keras.membership import Change, Membership
from hvdtrain.private_api.keras import FitIterator, note_steps_seen, warn_of_interruption

__all__ = ["EpochIterator", "EpochPlace"]

_GONE = -1  # stands for a member that was lost


@dataclass(frozen=True, kw_only=True)
class EpochPlace:
    """The place of a training in its data after a step.

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

    @classmethod
    def from_json(cls, value: Any) -> EpochPlace:
        """The place of which ``dataclasses.asdict`` made this.

        Raises:
            DataError: Its position in the data is not valid.
            KeyError: Something else is missing.
        """
        position = value["position"]
        return cls(
            position=None if position is None else Position.from_json(position),
            epoch_step=int(value["epoch_step"]),
            epochs=int(value["epochs"]),
            passes=int(value["passes"]),
            ranks=int(value["ranks"]),
        )


class _Taken(NamedTuple):
    """The places in the pass's order that members took in one step, in the order of their ranks.

    As a step and the pass that it belongs to, of which few are ever needed.
    """

    pass_: Pass
    step: int
    members: tuple[int, ...]

    def places_of(self, lost: Collection[int]) -> list[int]:
        """Return the places that the members in ``lost`` took."""
        return [
            place
            for rank, member in enumerate(self.members)
            if member in lost
            for place in self.pass_.position.places(self.pass_.share(self.step, rank))
        ]


class EpochIterator:
    """The iterator over the steps of ``fit``, with its place in the data.

    Args:
        steps_per_epoch: Steps after which an epoch ends; None for as many as a pass has.
        steps_per_execution: How many steps Keras runs in one go.
        accumulates: Whether the gradients of several steps are applied together.
        input_wait: Times how long steps wait for their batches.
    """

    def __init__(
        self,
        sharded: ShardedInput,
        membership: Membership,
        *,
        steps_per_epoch: int | None,
        steps_per_execution: int,
        accumulates: bool,
        input_wait: InputWait,
    ) -> None:
        self.sharded = sharded
        """This rank's share, another one after ranks were lost."""
        self.input_wait = input_wait
        """The time that its steps have waited for their batches."""
        self._membership = membership
        self._accumulates = accumulates
        self._unapplied: list[_Taken] = []  # steps whose gradients wait for those of others
        self._missed: set[int] = set()  # places in the pass's order
        self._steps_per_epoch = steps_per_epoch
        self._block = steps_per_execution
        self.step = 0
        """Steps since the training began, the block in work included."""
        self._epoch = 0
        self._epochs = 0  # ended
        self._passes = 0  # begun
        self._resumed: EpochPlace | None = None
        self.begins: dict[int, Position] = {}
        """The positions, by epoch, at which passes begin that don't begin at their start."""
        self._pass: Pass | None = None
        self._iterator: Any = None
        self._done = 0  # steps of the pass, the block in work included
        self._within = 0  # steps of the block in work, 0 between two
        self._before = 0  # steps of the epoch before that block
        self._ran_out = False  # the pass had fewer steps than it could tell

    def place(self, *, epoch_step: int) -> EpochPlace:
        """Return the place in the data after the block of steps in work.

        Args:
            epoch_step: Steps of this epoch that are done; 0 where the block was its last.
        """
        return self._place(self._done, epoch_step, epoch_ends=not epoch_step, pass_ends=self.ended)

    def place_within(self, left: int) -> tuple[int, EpochPlace]:
        """Return the epoch, and the place as ``place`` does, while a block of steps is in work.

        Args:
            left: Steps of the block that are not done.
        """
        assert self._pass is not None
        epoch_step, done = self._before + self._within - left, self._done - left
        limit = self._steps_per_epoch
        pass_ends = done == self._pass.steps
        ends = pass_ends if limit is None else epoch_step == limit
        step = 0 if ends else epoch_step
        return self._epoch + ends, self._place(done, step, epoch_ends=ends, pass_ends=pass_ends)

    def _place(
        self, done: int, epoch_step: int, *, epoch_ends: bool, pass_ends: bool
    ) -> EpochPlace:
        goes_on = not epoch_ends or (self._steps_per_epoch is not None and not pass_ends)
        return EpochPlace(
            position=self._pass.after(done) if self._pass and goes_on else None,
            epoch_step=epoch_step,
            epochs=self._epochs - (not epoch_ends),
            passes=self._passes - goes_on,
            ranks=self._membership.size,
        )

    def note_contributions(self, contributed: Sequence[Collection[int] | None]) -> None:
        """Call after each block of steps where ranks may be lost.

        Args:
            contributed: For each of its steps the members whose gradients were applied with it;
                None where none were.
        """
        assert self._pass is not None
        members = self._membership.members
        for step, those in enumerate(contributed, self._done - self._within):
            self._unapplied.append(_Taken(self._pass, step, members))
            if those is None and self._accumulates:
                continue
            self.note_joined(those)

    def note_joined(self, members: Collection[int] | None) -> None:
        """Call when all that waits for others was applied, with what these members had; None: all.

        After steps ``note_contributions`` does; this is for what happens between two steps.
        """
        for taken in self._unapplied:
            # What is gone has been given to others when it was lost.
            lacking = [] if members is None else set(taken.members).difference(members, (_GONE,))
            self._missed.update(taken.places_of(lacking) if lacking else ())
        self._unapplied = []

    def redistribute(self, change: Change) -> None:
        """Give what is left of the pass to the ranks that are left."""
        membership = self._membership
        for taken in self._unapplied:
            self._missed.update(taken.places_of(change.lost))
        self._unapplied = [
            taken._replace(members=tuple(m if m in change.now else _GONE for m in taken.members))
            for taken in self._unapplied
        ]
        self.sharded = self.sharded.reshard(rank=membership.rank, size=membership.size)
        if self._pass is None or (self.ended and not self._missed):
            return
        position = self._pass.after(self._done).missing(self._missed)
        self._missed = set()
        self._read(self.sharded.begin(position, repeatable=True))

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps of the epochs that begin now; None where that isn't known."""
        return self._steps_per_epoch or self.sharded.steps

    @property
    def steps_left(self) -> int | None:
        """The steps left of an epoch that ends with its pass; None for others or where unknown."""
        if self._steps_per_epoch is not None or self._pass is None or self._pass.steps is None:
            return None
        return self._pass.steps - self._done

    @property
    def ended(self) -> bool:
        """Whether nothing is left of the pass."""
        return self._pass is None or self._pass.steps == self._done or self._ran_out

    def resume(self, place: EpochPlace, *, epoch: int, step: int) -> None:
        """Begin with ``epoch``, after ``step`` steps, at the place that another run had come to."""
        self.step = step
        begin = self.begins.get(epoch, Position(epoch=epoch))
        self._resumed = replace(place, position=place.position or begin)
        self._epochs, self._passes = place.epochs, place.passes
        self.sharded.catch_up(epochs=place.epochs, passes=place.passes)

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

    def take_over(self, keras_iterator: Any) -> None:
        """Let ``fit``'s own iterator yield the steps of this object."""
        keras_iterator.__class__ = _EpochIterator
        keras_iterator.hvdtrain_epochs = self

    def steps(self, keras_iterator: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield first and last step of each block, and the iterator that it takes batches from."""
        goes_on = self._steps_per_epoch is not None and not self.ended
        step = 0 if goes_on else self._begin_pass()
        assert self._pass is not None
        limit = self._steps_per_epoch
        while limit is None or step < limit:
            if self.ended:
                if limit is not None:
                    warn_of_interruption(keras_iterator)
                break
            taken = self._block
            if self._pass.steps is not None:
                taken = min(taken, self._pass.steps - self._done)
            else:
                taken = self.sharded.agree_on_steps(taken)
                self._ran_out = not taken
                if self._ran_out:
                    continue
            self._done += taken
            self.step += taken
            note_steps_seen(keras_iterator, step + self._block)
            self._within = taken
            self._before = step
            yield step, step + self._block - 1, self._iterator
            self._within = 0
            step += self._block

    def _begin_pass(self) -> int:
        """Start the next pass; returns how many steps of the epoch are done."""
        first_step = 0
        # A rank lost from now on has taken these with it: they are no places of the next pass.
        self._unapplied = []
        elastic = self._membership.elastic
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.position is not None:
            begun = self.sharded.begin(resumed.position, ranks=resumed.ranks, repeatable=elastic)
            first_step = self._steps_before(resumed, begun.steps)
        else:
            begin = self.begins.get(self._epoch, Position(epoch=self._epoch))
            begun = self.sharded.begin(begin, repeatable=elastic)
        self._passes += 1
        self._read(begun)
        return first_step

    def _read(self, begun: Pass) -> None:
        self._pass = begun
        self._iterator = iter(self.input_wait.timed(begun.dataset))
        self._done = 0
        self._ran_out = False

    def _steps_before(self, resumed: EpochPlace, left: int | None) -> int:
        """Return the steps for Keras to count as done, by the number of ranks there is now."""
        if not resumed.epoch_step:
            return 0
        if self._steps_per_epoch is None and self.sharded.steps is not None:
            return max(0, self.sharded.steps - (left or 0))
        return -(-resumed.epoch_step * resumed.ranks // self._membership.size)


class _EpochIterator(FitIterator):
    """Keras' iterator, once ``take_over`` has changed its class."""

    hvdtrain_epochs: EpochIterator

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Any]]:
        return self.hvdtrain_epochs.steps(self)

    def _interrupted_warning(self) -> None:
        self.hvdtrain_epochs.run_out()
        super()._interrupted_warning()
