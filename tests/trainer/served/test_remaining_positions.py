import random
from collections import Counter

import pytest

from hvdtrain.data.partition import JointSteps, Position
from hvdtrain.trainer.served.worker_checkpoints import remaining_positions


class Ranks:
    """Ranks that go through the data at their own pace.

    Args:
        begins: The position where each epoch's pass begins.
        each: The number of units that a rank takes in a step.
        size: The number of ranks.
        units: The length of a pass; None if it is endless.
        first: The first epoch.
    """

    def __init__(self, begins, each, size, units, first):
        self.begins = begins
        self.each = each
        self.units = units
        self.positions = [self._begin(first)] * size

    def _begin(self, epoch):
        return self.begins.get(epoch, Position(epoch=epoch))

    def step(self, rank):
        """Return the next step of a rank, as pairs of an epoch and a place."""
        position = self.positions[rank]
        left = None if self.units is None else position.left_of(self.units)
        joint = JointSteps(units=left, each=self.each, size=len(self.positions))
        if joint.steps == 0:
            self.positions[rank] = self._begin(position.epoch + 1)
            return self.step(rank)
        self.positions[rank] = position.after(joint.units_in(1))
        return [(position.epoch, place) for place in position.places(joint.share(0, rank))]


@pytest.mark.parametrize("units", [1, 23, 40, None])
def test_every_unit_is_done_once(units):
    """Ranks stop and resume repeatedly, each time with a different number of ranks."""
    apart = 0
    for seed in range(150):
        chance = random.Random(seed)
        done = Counter()
        begins, first = {}, 0
        for _ in range(3):
            each, size = chance.randint(1, 4), chance.randint(1, 5)
            ranks = Ranks(begins, each, size, units, first)
            for _ in range(chance.choice([0, 5, 40])):
                done.update(ranks.step(chance.choice([0, 0, size - 1, chance.randrange(size)])))
            remaining = remaining_positions(ranks.positions, each=each, units=units, begins=begins)
            begins = begins | {position.epoch: position for position in remaining}
            first = remaining[0].epoch
            apart += len(remaining) > 1
            assert max(done.values(), default=1) == 1
            for epoch in range(first):
                assert {place for e, place in done if e == epoch} == set(range(units))
            for position in remaining:
                end = position.start + 10 if units is None else units
                left = {*position.missed, *range(position.start, end)}
                assert left == set(range(end)) - {p for e, p in done if e == position.epoch}
    assert apart > 20 or units is None
