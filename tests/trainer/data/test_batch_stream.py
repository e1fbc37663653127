"""Generators that are the same on all ranks."""

import numpy as np
import pytest

from hvdtrain.data.partition import Position
from hvdtrain.errors import DataError
from tests.trainer.data.ranks import ThreadEngine, flat, joint, on_ranks, shard_on_ranks

SIZE = 4


def numbered(count, *, last=SIZE):
    """Yield batches whose targets are their numbers. The last batch may be shorter."""
    for number in range(count):
        rows = last if number == count - 1 else SIZE
        yield np.full((rows, 2), number, "float32"), np.full((rows, 1), number)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 6, 7])
def test_each_rank_keeps_every_nth_batch(size, count):
    shares = shard_on_ranks(size, lambda _: numbered(count, last=1))
    assert all(share.joint_rows_known for share in shares)
    expected = [ids for _, y in numbered(count, last=1) for ids in [y[:, 0].tolist()]]
    assert joint(shares) == [
        flat(expected[first : first + size]) for first in range(0, count, size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_pass_resumes_within_a_stream(size, caplog):
    shares = shard_on_ranks(size, lambda _: numbered(9))
    begun = [share.begin(Position(epoch=0, start=4), ranks=4) for share in shares]
    streams = [each.dataset for each in begun]
    assert "the first 4 batches of the generator are read and dropped" in caplog.text
    steps = [share.agree_on_steps(10) for share in shares]
    assert steps == [-(-5 // size)] * size
    numbers = [[int(y[0, 0]) for (_, y), rows, _ in stream if rows] for stream in streams]
    assert numbers == [[*range(4 + rank, 9, size)] for rank in range(size)]


def test_ranks_compare_the_first_batch_before_the_first_step():
    batches = [*numbered(9)]
    with pytest.raises(DataError, match="content of the first batch is"):
        shard_on_ranks(2, lambda rank: (batch for batch in batches[rank:]))


@pytest.mark.parametrize("later", [[0, 1, 2, 4], [0, 1, 2, 3, 4, 5]])
def test_ranks_compare_all_batches_at_the_end_of_an_epoch(later):
    batches = [*numbered(9)]
    places = [[0, 1, 2, 3], later]
    shares = shard_on_ranks(2, lambda rank: (batches[place] for place in places[rank]))
    for share in shares:
        list(share.dataset)
    for result in on_ranks(2, lambda engine: shares[engine.rank].on_epoch_end()):
        assert isinstance(result, DataError)
        assert "different input" in str(result)


def test_a_finished_generator_is_an_error_in_the_next_epoch():
    shares = shard_on_ranks(2, lambda _: numbered(4))
    assert len(joint(shares)) == 2
    for share in shares:
        with pytest.raises(DataError, match=r"ended before another epoch.*steps_per_epoch"):
            share.on_epoch_begin(1)


def test_a_generator_in_an_elastic_job_is_an_error(monkeypatch):
    monkeypatch.setattr(ThreadEngine, "survives_losses", True)
    with pytest.raises(DataError, match="generator can't be used in an elastic job"):
        shard_on_ranks(2, lambda _: numbered(4))


def test_a_generator_may_reuse_its_memory():
    def reusing(_):
        x, y = np.zeros((SIZE, 2), "float32"), np.zeros((SIZE, 1), int)
        for number in range(7):
            y[:] = number
            yield x, y

    shares = shard_on_ranks(2, reusing)
    assert [set(ids) for ids in joint(shares)] == [{0, 1}, {2, 3}, {4, 5}, {6}]
