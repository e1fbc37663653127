import math
import threading
import time

import numpy as np
import pytest

from hvdtrain.errors import MismatchError
from tests.parameter_server.serving import SHAPES, asynchronous, change, serve

one_server = pytest.mark.ranks(3)
one_or_two_servers = pytest.mark.ranks(3, 4)


@one_or_two_servers
def test_overlapping_pushes_return_the_weights_of_the_previous_gradient(world):
    """Servers compute the staleness from the same version."""

    def work(worker):
        worker.begin()
        if worker.rank:
            return [worker.total()]
        client = worker.client
        results = []
        for _ in range(3):
            weights = worker.push(overlap=True)
            results.append(weights and change(weights))
        results += [client.has_newer_weights, change(client.pull()), client.has_newer_weights]
        # Nothing is in flight now.
        results += [worker.push(overlap=True), change(worker.push())]
        return [*results, client.pushed, worker.total()]

    results, stats = serve(work, asynchronous())
    assert results == [[None, 1.0, 2.0, True, 3.0, False, None, 5.0, 5, 5.0], [5.0]]
    for counts in stats:
        assert (counts.taken, counts.late, counts.updates) == (5, 0, 5)
        # The gradients after a pull have the newest weights; the others miss one update.
        assert counts.staleness == {0: 2, 1: 3}


@one_or_two_servers
def test_gradients_may_be_overwritten_after_a_push(world):
    """TensorFlow reuses their memory."""

    def work(worker):
        worker.begin()
        if worker.rank == 0:
            for _ in range(20):
                dense = [np.full(shape, -1.0, "float32") for shape in SHAPES]
                worker.client.push(dense, weight=1.0, learning_rate=math.nan, overlap=True)
                for array in dense:
                    array.fill(100.0)
        return worker.total()

    assert serve(work, asynchronous())[0] == [20.0, 20.0]


@one_or_two_servers
def test_a_request_during_an_overlapping_push_waits_for_its_reply(world):
    """The status and the weights in that reply must not be lost."""

    def work(worker):
        worker.begin()
        if worker.rank:
            worker.wait_for(0)
            worker.client.leave(stop=True)
            worker.notify(0)
            return worker.total()
        worker.notify(1)
        worker.wait_for(1)
        worker.push(overlap=True)
        assert not worker.client.stopped
        worker.client.update_status()
        assert (worker.client.stopped, worker.client.training) == (True, 1)
        assert change(worker.push(overlap=True)) == 1.0
        return worker.total()

    assert serve(work, asynchronous())[0] == [2.0, 2.0]


@one_server
def test_an_overlapping_push_that_is_refused_raises_at_the_next_request(world):
    """The next gradient isn't sent, and the worker may continue."""

    def work(worker):
        worker.begin()
        if worker.rank:
            for server in worker.client._servers:
                server.version += 1000
            worker.push(overlap=True)
            with pytest.raises(MismatchError, match="Rank 1 sent a gradient for version "):
                worker.push(overlap=True)
            for _ in range(3):
                worker.push(overlap=True)
        return worker.total()

    results, (counts,) = serve(work, asynchronous())
    assert results == [3.0, 3.0]
    assert counts.taken == 3


@one_server
@pytest.mark.parametrize("last", [0, 1])
def test_close_abandons_the_push_in_flight(world, last):
    """The reply would come after the other worker's next step, or after its end."""

    def work(worker):
        worker.begin()
        if worker.rank:
            worker.wait_for(0)
            time.sleep(last)
            return worker.total()
        worker.push(overlap=True)
        waiting = [t for t in threading.enumerate() if t.name.startswith("hvdtrain push")]
        assert waiting
        worker.client.close()
        assert not any(thread.is_alive() for thread in waiting)
        worker.notify(1)
        time.sleep(1 - last)
        return worker.total()

    assert serve(work, asynchronous(0))[0] == [1.0, 1.0]


@one_server
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bound", [0, 2])
def test_a_worker_waits_for_another_that_is_too_far_behind(world, bound, overlap):
    """It waits for the reply to the step after ``bound`` steps, or with overlap, one step later."""

    def work(worker):
        worker.begin()
        if worker.rank:
            worker.wait_for(0)
            time.sleep(0.5)
            pushed_s = time.monotonic()
            worker.push()
            return [pushed_s, worker.total()]
        for _ in range(bound + overlap):
            worker.push(overlap=overlap)
        worker.notify(1)
        worker.push(overlap=overlap)
        return [time.monotonic(), worker.total()]

    ((proceeded_s, total), (pushed_s, _)), _ = serve(work, asynchronous(bound))
    assert proceeded_s > pushed_s
    assert total == bound + overlap + 2.0
