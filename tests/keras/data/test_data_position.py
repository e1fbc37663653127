from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest

from hvdtrain.errors import DataError
from hvdtrain.keras.data.data_position import Position
from hvdtrain.keras.data.partition import JointSteps, rank_share, units_left


def _left(position: Position, units: int) -> list[int]:
    return units_left(np.arange(units), position).tolist()


def test_what_is_left() -> None:
    position = Position(epoch=3, start=6, missed=(1, 4))
    assert _left(position, 8) == [1, 4, 6, 7]
    assert position.left_of(8) == 4
    assert _left(position.after(1), 8) == [4, 6, 7]
    assert _left(position.after(3), 8) == [7]
    assert position.after(3) == Position(epoch=3, start=7)
    assert _left(position.after(3).missing(position.places([0, 2])), 8) == [1, 6, 7]
    assert position.after(4).left_of(8) == 0


def test_any_history_does_every_unit_once() -> None:
    draw = random.Random(4)
    for units in range(60):
        position, done = Position(epoch=0), []
        for _ in range(100):
            left = _left(position, units)
            assert position.left_of(units) == len(left)
            if not left:
                break
            taken = draw.randint(1, len(left))
            lost = draw.sample(range(taken), draw.randint(0, taken) if draw.random() < 0.3 else 0)
            done += [unit for place, unit in enumerate(left[:taken]) if place not in lost]
            position = position.after(taken).missing(position.places(lost))
            # What was lost comes first, with what was missed before; then the rest in its order.
            assert set(_left(position, units)) == set(left) - set(done)
            assert _left(position, units) == sorted(_left(position, units))
        else:
            continue
        assert sorted(done) == list(range(units))


@pytest.mark.parametrize(
    "position",
    [
        Position(epoch=0),
        Position(epoch=7, start=100),
        Position(epoch=1, start=9, missed=(0, 3, 8), joint_batch=4),
    ],
)
def test_positions_pass_through_json(position: Position) -> None:
    assert Position.from_json(json.loads(json.dumps(dataclasses.asdict(position)))) == position


_GOOD = {"epoch": 1, "start": 5, "missed": [2], "joint_batch": 4}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1],
        {},
        {"epoch": 1},
        {**_GOOD, "rank": 2},
        {**_GOOD, "epoch": -1},
        {**_GOOD, "epoch": "1"},
        {**_GOOD, "epoch": True},
        {**_GOOD, "start": 2.0},
        {**_GOOD, "missed": 2},
        {**_GOOD, "missed": [5]},
        {**_GOOD, "missed": [3, 2]},
        {**_GOOD, "missed": [2, 2]},
        {**_GOOD, "missed": ["2"]},
        {**_GOOD, "joint_batch": 0},
        {**_GOOD, "joint_batch": "4"},
    ],
)
def test_nonsense_is_no_position(value) -> None:
    with pytest.raises(DataError, match=r"position in the data.*[Ee]xpected"):
        Position.from_json(value)


@pytest.mark.parametrize("places", [[2], [-1], [0, 7]])
def test_only_what_was_given_out_can_be_missing(places: list[int]) -> None:
    with pytest.raises(DataError, match="is no position in the data"):
        Position(epoch=0).after(2).missing(places)


def test_less_than_nothing_can_not_be_done() -> None:
    with pytest.raises(DataError, match="-1 units"):
        Position(epoch=0).after(-1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("each", [1, 2, 5])
def test_shares_of_steps_are_what_ranks_take(size: int, each: int) -> None:
    for units in range(45):
        joint = JointSteps(units=units, each=each, size=size)
        steps = joint.steps
        assert steps is not None
        for rank in range(size):
            share = rank_share(np.arange(units), batch_size=each, rank=rank, size=size)
            taken = [*share.whole.tolist()]
            if share.last_joint_rows:
                taken.append(share.last[: share.last_rows].tolist())
            assert [list(joint.share(step, rank)) for step in range(steps)] == taken
        for first in range(steps + 1):
            for count in range(steps - first + 1):
                shares = [
                    joint.share(first + i, rank) for i in range(count) for rank in range(size)
                ]
                assert joint.units_in(first, count) == sum(map(len, shares))
        assert joint.units_in(0, steps + 3) == units


def test_steps_of_unknown_length_are_taken_as_whole() -> None:
    joint = JointSteps(units=None, each=1, size=3)
    assert joint.steps is None
    assert joint.units_in(5, 2) == 6
    assert joint.share(2, 1) == range(7, 8)
