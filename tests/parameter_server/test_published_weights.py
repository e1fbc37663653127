import numpy as np
import pytest

from hvdtrain import world as state
from hvdtrain.errors import CollectiveError
from hvdtrain.parameter_server import published_weights as module
from hvdtrain.parameter_server.published_weights import (
    GRADIENT_SLOTS,
    PublishedWeights,
    published_bytes,
    share_memory,
)
from hvdtrain.parameter_server.sharding import Spec, shard_variables
from tests.parameter_server.serving import WORKERS, asynchronous, serve

NBYTES = 1000


def make_writer_and_reader(slots=3):
    memory = np.zeros(published_bytes(NBYTES, slots), np.uint8)
    return PublishedWeights(memory, NBYTES, slots), PublishedWeights(memory, NBYTES, slots)


def fill_with(value):
    return lambda buffer: buffer.fill(value)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_newest_weights_are_read(slots):
    writer, reader = make_writer_and_reader(slots)
    buffer = np.empty(NBYTES, np.uint8)
    for value in range(1, 8):
        writer.write(fill_with(value), version=10 * value)
        assert (writer.newest == value).all()
        assert reader.read(buffer) == 10 * value
        assert (buffer == value).all()
    writer.write(fill_with(99), version=99)
    assert (buffer == 7).all(), "a copy"


def read_during(monkeypatch, reader, write):
    """Call ``write`` in the middle of the first copy, and return the version and values read."""
    copyto, calls = np.copyto, []

    def copy(target, source):
        copyto(target[:500], source[:500])
        if not calls:
            calls.append(0)
            write()
        copyto(target[500:], source[500:])

    monkeypatch.setattr(module.np, "copyto", copy)
    buffer = np.empty(NBYTES, np.uint8)
    return reader.read(buffer), *np.unique(buffer)


def test_a_slot_that_was_overwritten_while_it_was_copied_is_not_returned(monkeypatch):
    writer, reader = make_writer_and_reader()
    writer.write(fill_with(1), version=10)

    def write():
        for value in (2, 3, 4):
            writer.write(fill_with(value), version=10 * value)

    assert read_during(monkeypatch, reader, write) == (40, 4)


def test_a_slot_that_is_being_written_is_not_returned(monkeypatch):
    writer, reader = make_writer_and_reader()
    writer.write(fill_with(1), version=10)

    def fill_half(buffer):
        buffer[:500] = 4
        raise KeyboardInterrupt  # the reader continues in the middle of the write

    def write():
        for value in (2, 3):
            writer.write(fill_with(value), version=10 * value)
        with pytest.raises(KeyboardInterrupt):
            writer.write(fill_half, version=40)

    assert read_during(monkeypatch, reader, write) == (30, 3)


def test_a_reader_that_is_overtaken_every_time_raises(monkeypatch):
    writer, reader = make_writer_and_reader()
    writer.write(fill_with(1), version=1)

    def overtaken(target, source):
        for _ in range(3):
            writer.write(fill_with(1), version=1)

    monkeypatch.setattr(module.np, "copyto", overtaken)
    with pytest.raises(CollectiveError, match="1000 times in a row"):
        reader.read(np.empty(NBYTES, np.uint8))


@pytest.mark.ranks(2, 3)
def test_readers_on_other_ranks_never_get_a_mixture(world):
    """The last rank writes as fast as it can."""
    collectives = state.collectives()
    server = collectives.size - 1
    (shard,) = shard_variables([Spec("kernel", (1_000_000,), "float32")], 1)
    memory = share_memory(collectives, [server], [shard])
    assert memory.readers == frozenset(range(collectives.size))
    published = memory.published[server]
    if collectives.rank == server:
        for version in range(1, 401):
            published.write(fill_with(version % 251), version)
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


@pytest.mark.ranks(3, 4)
def test_each_worker_has_its_own_slots_for_each_server(world):
    collectives = state.collectives()
    ranks = range(collectives.size)
    servers = [rank for rank in ranks if rank not in WORKERS]
    shards = shard_variables(
        [Spec("kernel", (1000, 3), "float32"), Spec("bias", (7,), "float32")], len(servers)
    )
    slots = share_memory(collectives, servers, shards).slots
    others = servers if collectives.rank in WORKERS else list(WORKERS)
    assert sorted(slots) == others
    if collectives.rank in WORKERS:
        for server, buffers in slots.items():
            for number, buffer in enumerate(buffers):
                buffer[...] = 100 * collectives.rank + 10 * server + number
    collectives.barrier()
    for other, buffers in slots.items():
        assert len(buffers) == GRADIENT_SLOTS
        for number, buffer in enumerate(buffers):
            worker, server = sorted([other, collectives.rank])
            assert buffer.size == shards[servers.index(server)].nbytes
            assert buffer.ctypes.data % 64 == 0
            assert (buffer == 100 * worker + 10 * server + number).all()
    collectives.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["another host", "no memory", "no memory for gradients"])
def test_without_shared_memory_servers_keep_weights_and_workers_have_no_slots(
    world, monkeypatch, case
):
    collectives = state.collectives()
    share, calls = collectives.share, []

    def share_some(nbytes):
        calls.append(nbytes)
        if case == "no memory" or (case == "no memory for gradients" and len(calls) == 2):
            return {}
        shared = share(nbytes)
        if case == "another host":
            return {rank: memory for rank, memory in shared.items() if rank == collectives.rank}
        return shared

    monkeypatch.setattr(collectives, "share", share_some)
    (shard,) = shard_variables([Spec("kernel", (100,), "float32")], 1)
    memory = share_memory(collectives, [1], [shard])
    assert not memory.slots
    if case == "no memory":
        assert memory.readers == frozenset()
        assert list(memory.published) == [1] * collectives.rank
    if collectives.rank == 1:
        memory.published[1].write(fill_with(5), version=1)
        assert (memory.published[1].newest == 5).all()


@pytest.mark.ranks(3)
def test_dense_gradients_in_shared_memory_are_not_sent(world, monkeypatch):
    """The first slot is reused once its gradient has been applied."""
    sent = []

    def work(worker):
        worker.begin()
        start = worker.client._messages.start_send

        def note(data, to, tag):
            sent.append(data.nbytes)
            return start(data, to, tag)

        monkeypatch.setattr(worker.client._messages, "start_send", note)
        for _ in range(3):
            worker.push()
        slots = worker.client._slots[2]
        return [max(sent) < 1000, bool(slots[0].any()), bool(slots[1].any()), worker.total()]

    results, (counts,) = serve(work, asynchronous())
    assert results == [[True, True, False, 6.0]] * 2
    assert counts.taken == 6


@pytest.mark.ranks(3)
def test_overlapping_pushes_alternate_between_slots(world):
    """A server may still read the slot of the gradient in flight."""

    def work(worker):
        worker.begin()
        values = []
        for value in (1.0, 2.0, 3.0):
            worker.push(-value, overlap=True)
            values.append([float(slot[:4].view("float32")[0]) for slot in worker.client._slots[2]])
        return [values, worker.total()]

    results, _ = serve(work, asynchronous())
    assert results == [[[[-1.0, 0.0], [-1.0, -2.0], [-3.0, -2.0]], 12.0]] * 2
