from __future__ import annotations

import threading
from collections.abc import Iterator

import keras
import numpy as np
import pytest

from hvdtrain.trainer.data.host_batches import HostBatches, Share
from tests.trainer.data.ranks import TIMEOUT_S

SPEC = (keras.KerasTensor((2, 1)), None)


def _share(number: int) -> Share:
    return Share((np.full((2, 1), number, "float32"), None), 2, 4)


def _numbers(batches: HostBatches) -> list[int]:
    return [int(share.batch[0][0, 0]) for share in batches]


def _batches(make, *, reads_ahead: bool = True) -> HostBatches:
    return HostBatches(make, SPEC, num_batches=5, reads_ahead=reads_ahead)


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_each_iterator_reads_all_steps_in_order(reads_ahead: bool) -> None:
    batches = _batches(lambda: map(_share, range(5)), reads_ahead=reads_ahead)
    assert [_numbers(batches) for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2
    assert batches.num_batches == 5
    assert batches.element_spec == Share(SPEC, None, None)
    share = next(iter(batches))
    assert keras.ops.is_tensor(share.batch[0])
    assert share.batch[1] is None
    assert (share.rows, share.joint_rows) == (2, 4)


def test_keras_reads_them_as_they_are() -> None:
    batches = _batches(lambda: map(_share, range(5)))
    assert batches.get_torch_dataloader() is batches
    assert batches.get_jax_iterator() is batches


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_nothing_is_read_before_the_first_step(reads_ahead: bool) -> None:
    read: list[int] = []

    def make() -> Iterator[Share]:
        for number in range(5):
            read.append(number)
            yield _share(number)

    iterator = iter(_batches(make, reads_ahead=reads_ahead))
    assert read == []
    next(iterator)
    assert read[0] == 0


def test_the_next_step_is_made_during_a_step() -> None:
    made = [threading.Event() for _ in range(5)]

    def make() -> Iterator[Share]:
        for number, event in enumerate(made):
            event.set()
            yield _share(number)

    for number, _ in enumerate(_batches(make)):
        assert number == 4 or made[number + 1].wait(TIMEOUT_S)
        assert number > 2 or not made[number + 2].is_set()


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_an_error_is_raised_after_the_steps_before_it(reads_ahead: bool) -> None:
    def make() -> Iterator[Share]:
        yield _share(0)
        yield _share(1)
        raise RuntimeError("disk on fire")

    iterator = iter(_batches(make, reads_ahead=reads_ahead))
    assert [int(next(iterator).batch[0][0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="disk on fire"):
        next(iterator)


def test_stages_see_each_step_before_keras() -> None:
    batches = _batches(lambda: map(_share, range(5)))
    without_rows = batches.map(lambda share: share._replace(rows=0))
    first_two = without_rows.through(lambda shares: (next(shares) for _ in range(2)))
    assert [(share.rows, share.joint_rows) for share in first_two] == [(0, 4)] * 2
    assert [share.rows for share in batches] == [2] * 5
