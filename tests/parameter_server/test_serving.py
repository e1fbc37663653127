"""Servers and workers of a real job: every gradient counts once, and nobody waits in vain."""

import json
import math
import time

import keras
import numpy as np
import pytest

from hvdtrain import world as state
from hvdtrain.bench.machine import resident_bytes
from hvdtrain.collectives import fusion as messages_module
from hvdtrain.errors import MismatchError, NonFiniteError
from hvdtrain.parameter_server import gradients as gradients_module
from hvdtrain.parameter_server.gradients import Rows
from tests.parameter_server.serving import SHAPES, START, WORKERS, free, rounds, serve, went

one_server = pytest.mark.ranks(3)
one_or_two_servers = pytest.mark.ranks(3, 4)


@one_or_two_servers
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("bound", [None, 1])
def test_every_gradient_is_applied_once(world, monkeypatch, bound, shares):
    """Also when one worker has more of them than the other; and where no memory is shared."""
    if not shares:
        monkeypatch.setattr(state.collectives(), "share", lambda nbytes: {})

    def work(worker):
        worker.begin()
        for _ in range(5 + 7 * worker.rank):
            worker.push()
        return [worker.client.pushed, worker.done(), int(worker.optimizer.iterations.numpy())]

    said, served = serve(work, free(bound))
    assert said == [[5, 17.0, 17], [12, 17.0, 0]]
    for counts in served:
        assert (counts.taken, counts.late, counts.updates) == (17, 0, 17)


@one_or_two_servers
@pytest.mark.parametrize("late", WORKERS)
def test_nobody_begins_before_the_chief_has_loaded(world, late):
    def work(worker):
        time.sleep(0.4 * (worker.rank == late))
        first = went(worker.begin())
        return [first, worker.done()]

    said, served = serve(work, free())
    assert said == [[0.0, 0.0]] * 2
    assert [counts.updates for counts in served] == [0] * len(served)


@one_or_two_servers
def test_state_of_the_optimizer_goes_there_and_back(world):
    """It goes on from the chief's, and that ends as if it had made all updates by itself."""

    def make():
        optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
        variables = [keras.Variable(np.full(shape, START, "float32")) for shape in SHAPES]
        optimizer.build(variables)
        return optimizer, variables

    def update(optimizer, variables, count):
        for _ in range(count):
            gradients = [np.full(shape, -1.0, "float32") for shape in SHAPES]
            optimizer.apply(gradients, variables)

    def work(worker):
        if worker.rank == 0:
            update(optimizer, variables, 2)
        worker.begin()
        for _ in range(3):
            worker.push()
        return worker.done()

    optimizer, variables = make()
    said, _ = serve(work, free(), optimizer=optimizer)
    expected, plain = make()
    update(expected, plain, 2)
    before = float(plain[2].numpy())
    update(expected, plain, 6)
    assert said == pytest.approx([float(plain[2].numpy()) - before] * 2)
    if state.collectives().rank == 0:
        for found, wanted in zip(optimizer.variables, expected.variables, strict=True):
            np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-6)


@one_or_two_servers
@pytest.mark.parametrize("message_bytes", [messages_module.MESSAGE_BYTES, 2048])
def test_gradient_for_weights_that_never_were(world, monkeypatch, message_bytes):
    """It is refused and changes nothing; all go on, its worker too, however large the shards."""
    monkeypatch.setattr(messages_module, "MESSAGE_BYTES", message_bytes)

    def work(worker):
        worker.begin()
        if worker.rank == 1:
            worker.push()
            for server in worker.client._servers:
                server.version += 1000
            with pytest.raises(MismatchError, match=r"rank 2: Rank 1 sent a gradient for version "):
                worker.push()
        for _ in range(5):
            worker.push()
        return worker.done()

    said, served = serve(work, free())
    assert said == [11.0, 11.0]
    assert [counts.taken for counts in served] == [11] * len(served)


@one_server
def test_gradient_of_rows_that_there_are_not(world, monkeypatch):
    """As a worker with other variables might send it: here no row is left out, or counted anew."""
    monkeypatch.setattr(gradients_module, "take_rows", lambda piece, spec, *rows: rows)

    def work(worker):
        worker.begin()
        rows = Rows(np.array([0, 1500]), np.full((2, 2), -1.0, "float32"))
        if worker.rank == 1:
            with pytest.raises(MismatchError, match="rows 0 to 1500 of a piece with 1500"):
                worker.client.push([rows, None, None], weight=1.0, learning_rate=math.nan)
        worker.push()
        return worker.done()

    said, (counts,) = serve(work, free())
    assert said == [2.0, 2.0]
    assert counts.taken == 2


@one_server
@pytest.mark.parametrize(("rule", "total"), [(free(), 2.0), (rounds(), 1.0)])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_gradient_that_is_not_finite(world, rule, total, bad):
    """It is refused and changes nothing; its worker may send another in its place."""

    def work(worker):
        worker.begin()
        dense = [np.full(shape, -1.0, "float32") for shape in SHAPES]
        dense[1][3] = bad
        rows = Rows(np.array([2, 1499]), np.array([[-1, -1], [-1, bad]], "float32"))
        if worker.rank == 1:
            for gradients in (dense, [rows, None, None]):
                said = "rank 2: Rank 1 sent a gradient with NaN or infinity: variable"
                with pytest.raises(NonFiniteError, match=said):
                    worker.client.push(gradients, weight=1.0, learning_rate=math.nan)
        worker.push()
        return worker.done()

    said, (counts,) = serve(work, rule)
    assert said == [total] * 2
    assert counts.taken == 2


@one_or_two_servers
def test_values_that_are_not_finite_where_they_may_be(world):
    def work(worker):
        worker.begin()
        if worker.rank == 1:
            worker.push(math.nan)
        return bool(np.isnan(worker.last()[0]).all())

    said, served = serve(work, free(), require_finite=False)
    assert said == [True, True]
    assert [counts.taken for counts in served] == [1] * len(served)


@one_or_two_servers
def test_rows_reach_their_server(world):
    """Sparse gradients of both workers, and variables without any."""

    def work(worker):
        worker.begin()
        indices = np.array([worker.rank, 1499, worker.rank])
        rows = Rows(indices, np.full((3, 2), -1.0, "float32"))
        worker.client.push([rows, None, None], weight=1.0, learning_rate=math.nan)
        table, *others = worker.last()
        assert all((array == START).all() for array in others)
        changed = np.flatnonzero((table != START).any(axis=1))
        return [changed.tolist(), (table[changed] - START).tolist()]

    said, _ = serve(work, free())
    assert said == [[[0, 1, 1499], [[2.0, 2.0]] * 3]] * 2


@one_server
def test_staleness(world):
    """Worker 0 takes a while for its gradient, meanwhile there are three updates."""

    def work(worker):
        worker.begin()
        if worker.rank == 0:
            worker.tell(1)
            worker.hear(1)
            worker.push()
        else:
            worker.hear(0)
            for _ in range(3):
                worker.push()
            worker.tell(0)
        return worker.done()

    said, (counts,) = serve(work, free())
    assert said == pytest.approx([4] * 2)
    assert counts.staleness == {0: 3, 3: 1}


@one_server
@pytest.mark.parametrize("leaves", [False, True])
def test_worker_waits_for_one_that_is_behind(world, leaves):
    """With a bound of 1 its second gradient is answered when the other has sent one, or left."""

    def work(worker):
        worker.begin()
        if worker.rank == 0:
            worker.push()
            worker.tell(1)
            worker.push()
            went_on = time.monotonic()
            return [went_on, worker.done()]
        worker.hear(0)
        time.sleep(0.5)
        followed = time.monotonic()
        if not leaves:
            worker.push()
        return [followed, worker.done()]

    ((went_on, total), (followed, _)), _ = serve(work, free(1))
    assert went_on > followed
    assert total == 2.0 + (not leaves)


@one_or_two_servers
def test_rounds_take_the_mean(world):
    """Of those that have a gradient, by their weights; steps without any change nothing."""

    def work(worker):
        worker.begin()
        found = []
        for step in [(-1.0, -4.0), (-1.0, None), (None, -8.0), (None, None), (-6.0, -6.0)]:
            weights = worker.push(step[worker.rank], weight=1.0 + worker.rank)
            found.append(went(weights))
        return [*found, worker.done()]

    said, served = serve(work, rounds())
    assert said == [[3.0, 4.0, 12.0, 12.0, 18.0, 18.0]] * 2
    for counts in served:
        assert (counts.taken, counts.late, counts.updates) == (6, 0, 4)
        assert counts.staleness == {0: 4}


@one_or_two_servers
def test_rounds_go_on_when_a_worker_has_no_more(world):
    def work(worker):
        worker.begin()
        for _ in range(2 + 4 * worker.rank):
            worker.push()
        return worker.done()

    said, served = serve(work, rounds())
    assert said == [6.0, 6.0]
    assert [counts.updates for counts in served] == [6] * len(served)


@one_server
def test_late_gradients_of_a_step_are_dropped(world):
    """One of two is enough; the other's is too late, and its next is for the step at hand."""

    def work(worker):
        worker.begin()
        if worker.rank == 0:
            worker.hear(1)
            for _ in range(3):
                worker.push()
            worker.tell(1)
            worker.hear(1)
        else:
            worker.tell(0)
            worker.hear(0)
            assert went(worker.push(-100.0)) == 3.0
            assert went(worker.push(-10.0)) == 13.0
            worker.tell(0)
        return worker.done()

    said, (counts,) = serve(work, rounds(1))
    assert said == [13.0, 13.0]
    assert (counts.taken, counts.late, counts.updates) == (4, 1, 4)


@one_server
def test_gradients_of_different_variables(world):
    """Whoever comes second is told that it has another loss, and the round is the other's."""

    def work(worker):
        worker.begin()
        gradients = [np.full(shape, -1.0, "float32") for shape in SHAPES]
        if worker.rank == 1:
            gradients[1:] = [None, None]
        refused = ""
        try:
            worker.client.push(gradients, weight=1.0, learning_rate=math.nan)
        except MismatchError as error:
            refused = str(error)
        return [refused, [float(array.max()) - START for array in worker.last()]]

    ((first, weights), (second, others)), (counts,) = serve(work, rounds())
    assert bool(first) != bool(second)
    assert "Workers have gradients for different variables" in first + second
    assert weights == others == ([1.0, 0.0, 0.0] if first else [1.0, 1.0, 1.0])
    assert (counts.taken, counts.updates) == (1, 1)


@one_or_two_servers
def test_learning_rate_is_the_chiefs(world):
    def work(worker):
        worker.begin()
        if worker.rank == 0:
            worker.push(rate=0.25)
            worker.push()
            worker.tell(1)
            worker.hear(1)
            worker.push(rate=2.0)
        else:
            worker.hear(0)
            worker.push()
            worker.tell(0)
        return worker.done()

    said, _ = serve(work, free())
    assert said == [2.75, 2.75]


@one_or_two_servers
@pytest.mark.parametrize("ends", WORKERS)
def test_worker_that_ends_the_training_of_all(world, ends):
    """The other sees it with its next weights."""

    def work(worker):
        worker.begin()
        if worker.rank == ends:
            worker.push()
            return [worker.client.stopped, worker.done(stop=True)]
        limit = time.monotonic() + 60
        while not worker.client.stopped and time.monotonic() < limit:
            worker.push(0.0)
        return [worker.client.stopped, worker.done()]

    said, _ = serve(work, free())
    stopped = [entry[0] for entry in said]
    assert stopped[1 - ends]
    assert not stopped[ends]
    assert [entry[1] for entry in said] == [1.0, 1.0]


@one_server
def test_memory_of_a_server_does_not_grow_with_its_updates(world):
    """In 2500 more; where nobody asked for the end of an answer's message, MPI kept 1 KB each."""
    resident = {}

    class Memory:
        def write(self, line):
            version = json.loads(line)["version"]
            if version in (500, 3000):
                resident[version] = resident_bytes()

    def work(worker):
        worker.begin()
        for _ in range(1500):
            worker.push()
        return worker.done()

    _, served = serve(work, free(), log=Memory())
    assert [counts.updates for counts in served] == [3000]
    if state.collectives().rank not in WORKERS:
        assert resident[3000] - resident[500] < 2**20
