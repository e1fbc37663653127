"""Gradients that are under way while their worker does something else."""

import math
import threading
import time

import numpy as np
import pytest

from hvdtrain.errors import MismatchError
from tests.parameter_server.serving import SHAPES, free, serve, went

one_server = pytest.mark.ranks(3)
one_or_two_servers = pytest.mark.ranks(3, 4)


@one_or_two_servers
def test_weights_are_those_of_the_gradient_before(world):
    """And so are the versions that the servers reckon staleness with."""

    def work(worker):
        worker.begin()
        if worker.rank:
            return [worker.done()]
        client = worker.client
        found = []
        for _ in range(3):
            weights = worker.push(ahead=True)
            found.append(weights and went(weights))
        found += [client.is_ahead, went(client.pull()), client.is_ahead]
        # Nothing is under way now.
        found += [worker.push(ahead=True), went(worker.push())]
        return [*found, client.pushed, worker.done()]

    said, served = serve(work, free())
    assert said == [[None, 1.0, 2.0, True, 3.0, False, None, 5.0, 5, 5.0], [5.0]]
    for counts in served:
        assert (counts.taken, counts.late, counts.updates) == (5, 0, 5)
        # Those after a pull are with the newest weights; each of the others misses the one before.
        assert counts.staleness == {0: 2, 1: 3}


@one_or_two_servers
def test_gradients_are_free_for_other_use(world):
    """As soon as they are pushed: TensorFlow uses their memory again."""

    def work(worker):
        worker.begin()
        if worker.rank == 0:
            for _ in range(20):
                dense = [np.full(shape, -1.0, "float32") for shape in SHAPES]
                worker.client.push(dense, weight=1.0, learning_rate=math.nan, ahead=True)
                for array in dense:
                    array.fill(100.0)
        return worker.done()

    assert serve(work, free())[0] == [20.0, 20.0]


@one_or_two_servers
def test_whatever_is_asked_waits_for_the_answer(world):
    """Nothing is lost of what the servers said, and the weights are still to be had."""

    def work(worker):
        worker.begin()
        if worker.rank:
            worker.hear(0)
            worker.client.leave(stop=True)
            worker.tell(0)
            return worker.done()
        worker.tell(1)
        worker.hear(1)
        worker.push(ahead=True)
        assert not worker.client.stopped
        worker.client.look()
        assert (worker.client.stopped, worker.client.training) == (True, 1)
        assert went(worker.push(ahead=True)) == 1.0
        return worker.done()

    assert serve(work, free())[0] == [2.0, 2.0]


@one_server
def test_a_refusal_comes_at_the_next_exchange(world):
    """The gradient that was to go then isn't sent; its worker may go on."""

    def work(worker):
        worker.begin()
        if worker.rank:
            for server in worker.client._servers:
                server.version += 1000
            worker.push(ahead=True)
            with pytest.raises(MismatchError, match="Rank 1 sent a gradient for version "):
                worker.push(ahead=True)
            for _ in range(3):
                worker.push(ahead=True)
        return worker.done()

    said, (counts,) = serve(work, free())
    assert said == [3.0, 3.0]
    assert counts.taken == 3


@one_server
@pytest.mark.parametrize("last", [0, 1])
def test_what_is_under_way_is_given_up(world, last):
    """Its answer would come when the other worker has made a step, or none has any left to make."""

    def work(worker):
        worker.begin()
        if worker.rank:
            worker.hear(0)
            time.sleep(last)
            return worker.done()
        worker.push(ahead=True)
        waiting = [t for t in threading.enumerate() if t.name.startswith("hvdtrain push")]
        assert waiting
        worker.client.close()
        assert not any(thread.is_alive() for thread in waiting)
        worker.tell(1)
        time.sleep(1 - last)
        return worker.done()

    assert serve(work, free(0))[0] == [1.0, 1.0]


@one_server
@pytest.mark.parametrize("bound", [0, 2])
def test_how_far_a_worker_comes(world, bound):
    """One step further than the server's bound, before any answer is withheld from it."""

    def work(worker):
        worker.begin()
        if worker.rank:
            worker.hear(0)
            time.sleep(0.5)
            followed = time.monotonic()
            worker.push()
            return [followed, worker.done()]
        for _ in range(bound + 1):
            worker.push(ahead=True)
        worker.tell(1)
        worker.push(ahead=True)
        return [time.monotonic(), worker.done()]

    ((went_on, total), (followed, _)), _ = serve(work, free(bound))
    assert went_on > followed
    assert total == bound + 3.0
