from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest

from hvdtrain.data.partition import (
    JointSteps,
    Position,
    epoch_order,
    joint_steps,
    rank_share,
    remaining_units,
)
from hvdtrain.errors import DataError


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_a_joint_step_equals_the_batch_of_a_single_process(
    size: int, batch_size: int, shuffle
) -> None:
    joint_batch = size * batch_size
    for rows in range(1, 40):
        order = epoch_order(rows, shuffle=shuffle, joint_batch=joint_batch, seed=3, epoch=1)
        assert sorted(order) == list(range(rows))
        joint = JointSteps(units=rows, each=batch_size, size=size)
        steps, rest = divmod(rows, joint_batch)
        assert joint.steps == joint_steps(rows, batch_size, size) == steps + bool(rest)
        full_steps, last_step = [], []
        for rank in range(size):
            full, last = rank_share(order, batch_size=batch_size, rank=rank, size=size)
            assert full.tolist() == [
                order[joint.share(step, rank)].tolist() for step in range(steps)
            ]
            count = len(joint.share(steps, rank))
            # Even a rank without data in the last step has a sample to compute with.
            assert len(last) == max(count, min(1, rest))
            full_steps.append(full)
            last_step.append(last[:count])
        samples = [np.stack(full_steps, axis=1).reshape(-1), *last_step]
        np.testing.assert_array_equal(np.concatenate(samples), order)


def test_the_order_is_numpys_permutation_of_seed_and_epoch() -> None:
    orders = {
        tuple(epoch_order(30, shuffle=True, joint_batch=4, seed=seed, epoch=epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert tuple(np.random.default_rng([2, 1]).permutation(30)) in orders


def test_shuffling_batches_keeps_each_sample_in_its_joint_batch() -> None:
    order = epoch_order(30, shuffle="batch", joint_batch=8, seed=1, epoch=0)
    assert order.tolist() != list(range(30))
    for start in range(0, 30, 8):
        assert sorted(order[start : start + 8]) == list(range(start, min(start + 8, 30)))


@pytest.mark.parametrize("units", [1, 7, 44])
def test_units_in_steps_equal_the_sum_of_all_shares(units: int) -> None:
    joint = JointSteps(units=units, each=2, size=3)
    steps = joint.steps or 0
    for first in range(steps + 1):
        for count in range(steps - first + 1):
            shares = [joint.share(first + i, rank) for i in range(count) for rank in range(3)]
            assert joint.units_in(first + count) - joint.units_in(first) == sum(map(len, shares))
    assert joint.units_in(steps + 3) == units


def test_steps_of_unknown_length_are_full() -> None:
    joint = JointSteps(units=None, each=1, size=3)
    assert joint.steps is None
    assert joint.units_in(7) - joint.units_in(5) == 6
    assert joint.share(2, 1) == range(7, 8)


def _left(position: Position, units: int) -> list[int]:
    return remaining_units(np.arange(units), position).tolist()


def test_remaining_units() -> None:
    position = Position(epoch=3, start=6, missed=(1, 4))
    assert _left(position, 8) == [1, 4, 6, 7]
    assert position.left_of(8) == 4
    assert _left(position.after(1), 8) == [4, 6, 7]
    assert _left(position.after(3), 8) == [7]
    assert position.after(3) == Position(epoch=3, start=7)
    assert _left(position.after(3).missing(position.places([0, 2])), 8) == [1, 6, 7]
    assert position.after(4).left_of(8) == 0


def test_every_unit_is_done_once_after_any_losses() -> None:
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
            assert _left(position, units) == sorted(set(left) - set(done))
        else:
            continue
        assert sorted(done) == list(range(units))


@pytest.mark.parametrize(
    "position",
    [
        Position(epoch=7, start=100),
        Position(epoch=1, start=9, missed=(0, 3, 8), joint_batch=4),
    ],
)
def test_positions_are_restored_from_json(position: Position) -> None:
    assert Position.from_json(json.loads(json.dumps(dataclasses.asdict(position)))) == position


_VALID = {"epoch": 1, "start": 5, "missed": [2], "joint_batch": 4}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1],
        {"epoch": 1},
        {**_VALID, "rank": 2},
        {**_VALID, "epoch": -1},
        {**_VALID, "epoch": "1"},
        {**_VALID, "epoch": True},
        {**_VALID, "start": 2.0},
        {**_VALID, "missed": 2},
        {**_VALID, "missed": [5]},
        {**_VALID, "missed": [3, 2]},
        {**_VALID, "missed": [2, 2]},
        {**_VALID, "missed": ["2"]},
        {**_VALID, "joint_batch": 0},
        {**_VALID, "joint_batch": "4"},
    ],
)
def test_an_invalid_position_is_an_error(value) -> None:
    with pytest.raises(DataError, match=r"Invalid position in the data, got .*expected"):
        Position.from_json(value)


@pytest.mark.parametrize("places", [[2], [-1], [0, 7]])
def test_only_places_before_the_start_can_be_missed(places: list[int]) -> None:
    with pytest.raises(DataError, match="Invalid position"):
        Position(epoch=0).after(2).missing(places)
