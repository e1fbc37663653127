"""An iterator over the steps of an epoch, which can start at any position in the data.

Keras' own loop counts the steps of an epoch from 0 to a fixed number. With this module's iterator,
training can be resumed in the middle of an epoch, and an epoch ends when its data end.

If a rank of an elastic job is lost, the remaining ranks divide the rest of the data among
themselves. They also train on samples that the lost rank had read but whose gradients were not
applied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras

from hvdtrain.data.partition import Position
from hvdtrain.private_api.keras import set_steps_seen, warn_of_interruption
from hvdtrain.trainer.data import ShardedInput, Share
from hvdtrain.trainer.data.sharded_input import Pass
from hvdtrain.trainer.fit_inputs import InputWait
from hvdtrain.trainer.membership import Change, Membership

__all__ = ["EpochIterator", "EpochPlace"]

_LOST = -1  # replaces a lost member in _Taken.members


@dataclass(frozen=True, kw_only=True)
class EpochPlace:
    """How far training has read its data, after some step.

    Training may read its data several times. Each time is called a pass over the data.
    """

    # Position within a pass over the data. None if the next epoch begins a new pass.
    position: Position | None
    epoch_step: int  # number of completed steps of the current epoch
    epochs: int  # number of epochs that have ended since training began
    passes: int  # number of passes that began before the pass in which training continues
    ranks: int  # number of ranks

    @classmethod
    def from_json(cls, value: Any) -> EpochPlace:
        """Create an ``EpochPlace`` from a dictionary that ``dataclasses.asdict`` returned.

        Raises:
            DataError: If the position is not valid.
            KeyError: If an entry is missing.
        """
        position = value["position"]
        return cls(
            position=None if position is None else Position.from_json(position),
            **{name: int(value[name]) for name in ("epoch_step", "epochs", "passes", "ranks")},
        )


class _Taken(NamedTuple):
    """The samples that each rank used in one step.

    ``members`` contains the ranks by their numbers at the start of the job, in the order of their
    current numbers.
    """

    pass_: Pass
    step: int
    members: tuple[int, ...]

    def places_of(self, members: Collection[int]) -> list[int]:
        """Return the positions of the samples that these ranks used in the step."""
        return [
            place
            for rank, member in enumerate(self.members)
            if member in members
            for place in self.pass_.position.places(self.pass_.share(self.step, rank))
        ]


class EpochIterator:
    """The iterator over the steps of ``fit``, which knows how far the data has been read.

    Args:
        steps_per_epoch: Number of steps in an epoch. If None, an epoch is one pass over the data.
        steps_per_execution: Number of steps in a block. Keras runs the steps of a block at once.
        accumulates: Whether the optimizer accumulates gradients of several steps and applies them
            together.
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
        """This rank's share of the data; replaced when ranks are lost."""
        self.input_wait = input_wait
        self._membership = membership
        self._accumulates = accumulates
        self._unapplied: list[_Taken] = []  # steps whose gradients are not applied yet
        self._missed: set[int] = set()  # places in the pass's order that must be read again
        self._steps_per_epoch = steps_per_epoch
        self._block = steps_per_execution
        self.step = 0
        """Steps since training began, including the current block."""
        self._epoch = 0
        self._epochs = 0  # number of epochs that have begun
        self._passes = 0  # number of passes that have begun
        self._resumed: EpochPlace | None = None
        self.begins: dict[int, Position] = {}
        """The positions where passes begin that don't begin at the start of the data, per epoch."""
        self._pass: Pass | None = None
        self._iterator: Any = None
        self._done = 0  # steps of the pass, including the current block
        self._block_steps = 0  # steps of the current block, 0 between blocks
        self._epoch_step = 0  # steps of the epoch before the current block
        self._ran_out = False  # whether the data of a pass of unknown length have ended
        self.is_idle = False
        """Whether the current step has no data, and callbacks must not notice it."""

    def place(self, *, epoch_step: int) -> EpochPlace:
        """Return the position at which training continues after the current block of steps.

        ``epoch_step`` is the number of completed steps of this epoch, or 0 if the epoch ends here.
        """
        return self._place(self._done, epoch_step, epoch_ends=not epoch_step, pass_ends=self.ended)

    def place_within(self, left: int) -> tuple[int, EpochPlace]:
        """Return the epoch and the position before the last ``left`` steps of the current block."""
        assert self._pass is not None
        epoch_step = self._epoch_step + self._block_steps - left
        done = self._done - left
        pass_ends = done == self._pass.steps
        limit = self._steps_per_epoch
        ends = pass_ends if limit is None else epoch_step == limit
        place = self._place(done, 0 if ends else epoch_step, epoch_ends=ends, pass_ends=pass_ends)
        return self._epoch + ends, place

    def _place(
        self, done: int, epoch_step: int, *, epoch_ends: bool, pass_ends: bool
    ) -> EpochPlace:
        continues = not epoch_ends or (self._steps_per_epoch is not None and not pass_ends)
        return EpochPlace(
            position=self._pass.after(done) if self._pass and continues else None,
            epoch_step=epoch_step,
            epochs=self._epochs - (not epoch_ends),
            passes=self._passes - continues,
            ranks=self._membership.size,
        )

    def record_contributions(self, contributed: Sequence[Collection[int] | None]) -> None:
        """Record which ranks' gradients were averaged in each step of a block.

        Must be called after each block in an elastic job. ``contributed`` has an entry for each
        step: the ranks whose gradients were averaged, or None if no gradients were averaged in this
        step. For example, if gradients are accumulated over several steps, only the last of these
        steps averages them.
        """
        assert self._pass is not None
        members = self._membership.members
        for step, contributors in enumerate(contributed, self._done - self._block_steps):
            self._unapplied.append(_Taken(self._pass, step, members))
            if contributors is not None or not self._accumulates:
                self.record_applied(contributors)

    def record_applied(self, members: Collection[int] | None) -> None:
        """Record that gradients of the ranks ``members`` were applied, or of all if None."""
        for taken in self._unapplied:
            # The samples of lost members were redistributed already.
            missing = [] if members is None else set(taken.members).difference(members, (_LOST,))
            self._missed.update(taken.places_of(missing) if missing else ())
        self._unapplied = []

    def redistribute(self, change: Change) -> None:
        """Divide the rest of the data of this pass among the remaining ranks."""
        membership = self._membership
        for taken in self._unapplied:
            self._missed.update(taken.places_of(change.lost))
        self._unapplied = [
            taken._replace(members=tuple(m if m in change.now else _LOST for m in taken.members))
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
        """The number of steps of an epoch that begins now. None if it is unknown."""
        return self._steps_per_epoch or self.sharded.steps

    @property
    def steps_left(self) -> int | None:
        """The number of remaining steps in this epoch.

        The number is None if ``steps_per_epoch`` was passed to ``fit``, or if the length of the
        data is unknown.
        """
        if self._steps_per_epoch is not None or self._pass is None or self._pass.steps is None:
            return None
        return self._pass.steps - self._done

    @property
    def ended(self) -> bool:
        """Whether the current pass over the data is finished."""
        return self._pass is None or self._pass.steps == self._done or self._ran_out

    def resume(self, place: EpochPlace, *, epoch: int, step: int) -> None:
        """Make training resume in ``epoch``, at a position that an earlier run has saved.

        ``place`` is the position that the earlier run had reached after ``step`` steps.
        """
        self.step = step
        begin = self.begins.get(epoch, Position(epoch=epoch))
        self._resumed = replace(place, position=place.position or begin)
        self._epochs, self._passes = place.epochs, place.passes
        self.sharded.catch_up(epochs=place.epochs, passes=place.passes)

    def on_epoch_begin(self, epoch: int) -> None:
        """Begin ``epoch``. Must be called before Keras' loop over the steps of this epoch."""
        self._epoch = epoch
        self._epochs += 1

    def run_out(self) -> None:
        """Don't count this block, because data of unknown length has ended before it."""
        self.step -= self._block_steps
        self._done -= self._block_steps
        self._block_steps = 0
        self._ran_out = True

    def attach(self, keras_iterator: Any) -> None:
        """Make the iterator that Keras' ``fit`` uses yield the steps of this ``EpochIterator``."""
        plain = type(keras_iterator)
        keras_iterator.__class__ = type(plain.__name__, (_AttachedMixin, plain), {})
        keras_iterator.hvdtrain_epochs = self

    def steps(self, keras_iterator: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield the first and last step of each block, and an iterator over its batches."""
        continues = self._steps_per_epoch is not None and not self.ended
        step = 0 if continues else self._begin_pass()
        assert self._pass is not None
        limit = self._steps_per_epoch
        # Keras' fit fails on JAX if an epoch has no step, so it gets a step without data.
        needs_step = keras.backend.backend() == "jax"
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
            set_steps_seen(keras_iterator, step + self._block)
            self._block_steps = taken
            self._epoch_step = step
            yield step, step + self._block - 1, self._iterator
            self._block_steps = 0
            step += self._block
            needs_step = False
        if needs_step:
            self.is_idle = True
            yield step, step, iter([Share(batch=None, rows=0, joint_rows=0)])
            self.is_idle = False

    def _begin_pass(self) -> int:
        """Start to read the data again, and return the number of completed steps."""
        first_step = 0
        self._unapplied = []  # their places belong to the previous pass
        elastic = self._membership.elastic
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.position is not None:
            new = self.sharded.begin(resumed.position, ranks=resumed.ranks, repeatable=elastic)
            first_step = self._steps_before(resumed, new.steps)
        else:
            begin = self.begins.get(self._epoch, Position(epoch=self._epoch))
            new = self.sharded.begin(begin, repeatable=elastic)
        self._passes += 1
        self._read(new)
        return first_step

    def _read(self, new: Pass) -> None:
        self._pass = new
        self._iterator = iter(self.input_wait.timed(new.dataset))
        self._done = 0
        self._ran_out = False

    def _steps_before(self, resumed: EpochPlace, left: int | None) -> int:
        """Return how many steps of a resumed epoch are completed.

        If the number of ranks has changed, the result is the number of steps that the current ranks
        would have needed for the same samples.
        """
        if not resumed.epoch_step:
            return 0
        if self._steps_per_epoch is None and self.sharded.steps is not None:
            return max(0, self.sharded.steps - (left or 0))
        return -(-resumed.epoch_step * resumed.ranks // self._membership.size)


class _AttachedMixin:
    """Mixin that ``EpochIterator.attach`` adds to the iterator of Keras' ``fit``."""

    hvdtrain_epochs: EpochIterator

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Any]]:
        return self.hvdtrain_epochs.steps(self)

    def _interrupted_warning(self) -> None:
        self.hvdtrain_epochs.run_out()
        super()._interrupted_warning()  # type: ignore[misc]
