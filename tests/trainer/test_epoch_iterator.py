"""The samples that are repeated when ranks are lost."""

from __future__ import annotations

from typing import Any

from hvdtrain.data.partition import JointSteps, Position
from hvdtrain.trainer.data.sharded_input import Pass
from hvdtrain.trainer.epoch_iterator import EpochIterator
from hvdtrain.trainer.fit_inputs import InputWait
from hvdtrain.trainer.membership import Change

UNITS, EACH = 24, 2


class Ranks:
    """Three ranks."""

    elastic = True
    rank = 0

    def __init__(self) -> None:
        self.members: tuple[int, ...] = (0, 1, 2)

    @property
    def size(self) -> int:
        return len(self.members)


class Share:
    """The share of the first rank."""

    steps = None

    def __init__(self, size: int) -> None:
        self.size = size
        self.positions: list[Position] = []

    def reshard(self, *, rank: int, size: int) -> Share:
        self.size = size
        return self

    def begin(self, position: Position, *, repeatable: bool) -> Pass:
        self.positions.append(position)
        joint = JointSteps(units=position.left_of(UNITS), each=EACH, size=self.size)
        return Pass(steps=joint.steps, position=position, joint=joint, presharded=False, make=list)


class Keras:
    """Keras' own iterator."""

    _steps_seen = 0


def iterator(ranks: Any, share: Any) -> tuple[EpochIterator, Any]:
    epochs = EpochIterator(
        share,
        ranks,
        steps_per_epoch=None,
        steps_per_execution=1,
        accumulates=True,
        input_wait=InputWait(),
    )
    return epochs, epochs.steps(Keras())


def lose(epochs: EpochIterator, ranks: Ranks, member: int) -> None:
    before = ranks.members
    ranks.members = tuple(m for m in before if m != member)
    epochs.redistribute(Change(before, ranks.members))


def test_unapplied_samples_of_a_lost_rank_are_repeated_once():
    ranks, share = Ranks(), Share(3)
    epochs, steps = iterator(ranks, share)
    next(steps)
    epochs.record_contributions([None])
    next(steps)
    epochs.record_contributions([None])
    lose(epochs, ranks, 2)
    # Two steps of six samples are done, except for the third rank's.
    assert share.positions[-1] == Position(epoch=0, start=12, missed=(4, 5, 10, 11))
    next(steps)
    epochs.record_contributions([{0, 1}])
    lose(epochs, ranks, 1)
    assert share.positions[-1] == Position(epoch=0, start=12)


def test_samples_applied_between_two_steps_are_not_repeated():
    ranks, share = Ranks(), Share(3)
    epochs, steps = iterator(ranks, share)
    next(steps)
    epochs.record_contributions([None])
    epochs.record_applied({0, 1, 2})
    next(steps)
    epochs.record_contributions([None])
    lose(epochs, ranks, 2)
    assert share.positions[-1] == Position(epoch=0, start=12, missed=(10, 11))
