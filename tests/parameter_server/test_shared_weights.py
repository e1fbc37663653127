"""Weights where they lie: whoever reads them gets those of one version, whatever is written."""

import numpy as np
import pytest

from hvdtrain import world as state
from hvdtrain.errors import CollectiveError
from hvdtrain.parameter_server import shared_memory as module
from hvdtrain.parameter_server.sharding import Spec, shard_variables
from hvdtrain.parameter_server.shared_memory import PublishedWeights, published_bytes, share_memory

NBYTES = 1000


def _make(slots=3):
    memory = np.zeros(published_bytes(NBYTES, slots), np.uint8)
    return PublishedWeights(memory, NBYTES, slots), PublishedWeights(memory, NBYTES, slots)


def _fill(value):
    return lambda buffer: buffer.fill(value)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_newest_is_read(slots):
    writer, reader = _make(slots)
    buffer = np.empty(NBYTES, np.uint8)
    for value in range(1, 8):
        writer.write(_fill(value), version=10 * value)
        assert (writer.newest == value).all()
        assert reader.read(buffer) == 10 * value
        assert (buffer == value).all()


def test_what_is_read_stays():
    writer, reader = _make()
    buffer = np.empty(NBYTES, np.uint8)
    writer.write(_fill(1), version=1)
    reader.read(buffer)
    for value in range(2, 9):
        writer.write(_fill(value), version=value)
    assert (buffer == 1).all()


def test_a_slot_that_is_written_again_is_not_read(monkeypatch):
    """All slots are overwritten while a reader copies its first one; it begins again."""
    writer, reader = _make()
    writer.write(_fill(1), version=1)
    copyto, calls = np.copyto, []

    def slow(target, source):
        calls.append(0)
        if len(calls) == 1:
            copyto(target[:500], source[:500])
            for value in (2, 3, 4):
                writer.write(_fill(value), version=value)
            copyto(target[500:], source[500:])
        else:
            copyto(target, source)

    monkeypatch.setattr(module.np, "copyto", slow)
    buffer = np.empty(NBYTES, np.uint8)
    assert reader.read(buffer) == 4
    assert (buffer == 4).all()


def test_a_slot_that_is_being_written_is_not_read(monkeypatch):
    """A reader ends its copy while the writer is in the middle of the same slot."""
    writer, reader = _make()
    writer.write(_fill(1), version=1)
    copyto, calls = np.copyto, []

    def half(buffer):
        buffer[:500] = 4
        raise KeyboardInterrupt  # goes no further until the reader has looked

    def slow(target, source):
        calls.append(0)
        if len(calls) == 1:
            for value in (2, 3):
                writer.write(_fill(value), version=value)
            with pytest.raises(KeyboardInterrupt):
                writer.write(half, version=4)
        copyto(target, source)

    monkeypatch.setattr(module.np, "copyto", slow)
    buffer = np.empty(NBYTES, np.uint8)
    assert reader.read(buffer) == 3
    assert (buffer == 3).all()


def test_a_reader_gives_up_in_the_end(monkeypatch):
    writer, reader = _make()
    writer.write(_fill(1), version=1)

    def overtaken(target, source):
        for _ in range(3):
            writer.write(_fill(1), version=1)

    monkeypatch.setattr(module.np, "copyto", overtaken)
    with pytest.raises(CollectiveError, match="1000 times in a row"):
        reader.read(np.empty(NBYTES, np.uint8))


@pytest.mark.ranks(2, 3)
def test_on_real_ranks(world):
    """The last rank writes as fast as it can, and the others read; never is a copy of two."""
    collectives = state.collectives()
    server = collectives.size - 1
    (shard,) = shard_variables([Spec("kernel", (1_000_000,), "float32")], 1)
    weights = share_memory(collectives, [server], [shard])
    assert weights.readers == frozenset(range(collectives.size))
    published = weights.published[server]
    if collectives.rank == server:
        for version in range(1, 401):
            published.write(_fill(version % 251), version)
            if version == 1:
                collectives.barrier()
    else:
        collectives.barrier()
        buffer, last = np.empty(shard.nbytes, np.uint8), 1
        while last < 400:
            version = published.read(buffer)
            assert version >= last
            assert (buffer == version % 251).all()
            last = version
    collectives.barrier()


@pytest.mark.ranks(2)
def test_where_ranks_cannot_share(world, monkeypatch):
    collectives = state.collectives()
    monkeypatch.setattr(collectives, "share", lambda nbytes: {})
    (shard,) = shard_variables([Spec("kernel", (100,), "float32")], 1)
    weights = share_memory(collectives, [1], [shard])
    assert weights.readers == frozenset()
    assert list(weights.published) == [1] * collectives.rank
    if collectives.rank == 1:
        weights.published[1].write(_fill(5), version=1)
        assert (weights.published[1].newest == 5).all()
