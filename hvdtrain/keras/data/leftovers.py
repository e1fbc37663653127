"""The rest of the data when ranks that trained apart go on together: pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from hvdtrain.keras.data.partition import JointSteps, Position

__all__ = ["leftovers"]


def leftovers(
    positions: Sequence[Position],
    *,
    each: int,
    units: int | None,
    begins: Mapping[int, Position],
) -> list[Position]:
    """Return the ranks' joint position in each pass, from the slowest rank's to the fastest's.

    Args:
        positions: The position of each rank, which took its own share of every joint step before.
        each: Units that a rank took in a whole step.
        units: How many a pass has; None where unknown or endless. What a rank that has ended a pass
            of unknown length did in it after all others can't be told, and is done again.
        begins: Where passes began that did not begin at their start.
    """
    size = len(positions)
    found = []
    epochs = [position.epoch for position in positions]
    for epoch in range(min(epochs), max(epochs) + 1):
        within = [position for position in positions if position.epoch == epoch]
        begin = begins.get(epoch, Position(epoch=epoch))
        start = max((position.start for position in within), default=begin.start)
        if units is not None and max(epochs) > epoch:
            start = units
        missed: set[int] = set()
        for rank, position in enumerate(positions):
            if position.epoch <= epoch:
                here = position if position.epoch == epoch else begin
                left = None if units is None else here.left_of(units)
                joint = JointSteps(units=left, each=each, size=size)
                missed.update(_places_below(start, here, joint, rank))
        joint_batch = next((p.joint_batch for p in within if p.joint_batch), begin.joint_batch)
        found.append(
            Position(
                epoch=epoch,
                start=start,
                missed=tuple(sorted(missed)),
                joint_batch=joint_batch or each * size,
            )
        )
    return found


def _places_below(start: int, position: Position, joint: JointSteps, rank: int) -> Iterator[int]:
    """The places before ``start`` that ``rank`` would still have come to."""
    for step in itertools.count() if joint.steps is None else range(joint.steps):
        places = position.places(joint.share(step, rank))
        yield from (place for place in places if place < start)
        # What was missed comes first, and lies below: from here on all is behind.
        if places and places[-1] >= start:
            return
