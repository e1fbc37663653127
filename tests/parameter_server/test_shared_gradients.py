"""Gradients that servers read where workers put them."""

import pytest

from hvdtrain import world as state
from hvdtrain.parameter_server.sharding import Spec, shard_variables
from hvdtrain.parameter_server.shared_memory import GRADIENT_SLOTS, share_memory
from tests.parameter_server.serving import WORKERS, free, serve


@pytest.mark.ranks(3, 4)
def test_each_worker_has_slots_for_each_server(world):
    """None of them lies in another, and a server sees what the worker has written."""
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
def test_where_ranks_cannot_share(world, monkeypatch, case):
    """Neither with a server of another host, nor where there is no memory for it."""
    collectives = state.collectives()
    share, calls = collectives.share, []

    def share_some(nbytes):
        calls.append(nbytes)
        if case == "no memory" or (case == "no memory for gradients" and len(calls) == 2):
            return {}
        found = share(nbytes)
        if case == "another host":
            return {rank: memory for rank, memory in found.items() if rank == collectives.rank}
        return found

    monkeypatch.setattr(collectives, "share", share_some)
    (shard,) = shard_variables([Spec("kernel", (100,), "float32")], 1)
    assert not share_memory(collectives, [1], [shard]).slots


@pytest.mark.ranks(3)
def test_dense_gradients_are_not_sent(world, monkeypatch):
    """But where they lie is told; a slot is used again when its gradient has been applied."""
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
        return [max(sent) < 1000, bool(slots[0].any()), bool(slots[1].any()), worker.done()]

    said, (counts,) = serve(work, free())
    assert said == [[True, True, False, 6.0]] * 2
    assert counts.taken == 6


@pytest.mark.ranks(3)
def test_a_slot_that_is_under_way_is_left_alone(world):
    """The next gradient goes into the other one, also while the server still reads."""

    def work(worker):
        worker.begin()
        found = []
        for value in (1.0, 2.0, 3.0):
            worker.push(-value, ahead=True)
            found.append([float(slot[:4].view("float32")[0]) for slot in worker.client._slots[2]])
        return [found, worker.done()]

    said, _ = serve(work, free())
    assert said == [[[[-1.0, 0.0], [-1.0, -2.0], [-3.0, -2.0]], 12.0]] * 2
