"""Servers and workers of a real job, in which every gradient is applied once."""

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
from tests.parameter_server.serving import (
    SHAPES,
    START,
    WORKERS,
    asynchronous,
    change,
    serve,
    synchronous,
)

one_server = pytest.mark.ranks(3)
one_or_two_servers = pytest.mark.ranks(3, 4)


@one_or_two_servers
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("bound", [None, 1])
def test_every_gradient_is_applied_once(world, monkeypatch, bound, shares):
    """One worker has more gradients. The test runs with and without shared memory."""
    if not shares:
        monkeypatch.setattr(state.collectives(), "share", lambda nbytes: {})

    def work(worker):
        worker.begin()
        for _ in range(5 + 7 * worker.rank):
            worker.push()
        return [worker.client.pushed, worker.total(), int(worker.optimizer.iterations.numpy())]

    results, stats = serve(work, asynchronous(bound))
    assert results == [[5, 17.0, 17], [12, 17.0, 0]]
    for counts in stats:
        assert (counts.taken, counts.late, counts.updates) == (17, 0, 17)


@one_or_two_servers
def test_averages_arrive_without_the_rest_of_the_state(world):
    def work(worker):
        worker.begin()
        averages = None
        if worker.rank == 0:
            worker.push()
            arrays, received = worker.averages()
            averages = sorted({float(v) for array in arrays for v in array.reshape(-1)}), received
        worker.end()
        return averages

    optimizer = keras.optimizers.SGD(1.0, momentum=0.9, use_ema=True, ema_momentum=0.5)
    results, _ = serve(work, asynchronous(), optimizer=optimizer)
    values, received = results[0]
    # Keras starts the averages at zero.
    assert len(values) == 1
    assert 0 < values[0] <= START + 1
    weights = 4 * sum(math.prod(shape) for shape in SHAPES)
    assert 2 * weights <= received < 2.5 * weights


@one_or_two_servers
@pytest.mark.parametrize("late", WORKERS)
def test_workers_wait_for_the_chief_to_load_weights(world, late):
    def work(worker):
        time.sleep(0.4 * (worker.rank == late))
        initial = change(worker.begin())
        return [initial, worker.total()]

    results, stats = serve(work, asynchronous())
    assert results == [[0.0, 0.0]] * 2
    assert [counts.updates for counts in stats] == [0] * len(stats)


@one_or_two_servers
def test_optimizer_state_goes_to_the_servers_and_back(world):
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
        return worker.total()

    optimizer, variables = make()
    results, _ = serve(work, asynchronous(), optimizer=optimizer)
    expected, plain = make()
    update(expected, plain, 2)
    before = float(plain[2].numpy())
    update(expected, plain, 6)
    assert results == pytest.approx([float(plain[2].numpy()) - before] * 2)
    if state.collectives().rank == 0:
        for got, wanted in zip(optimizer.variables, expected.variables, strict=True):
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-6)


@one_or_two_servers
@pytest.mark.parametrize("message_bytes", [messages_module.MESSAGE_BYTES, 2048])
def test_a_gradient_with_an_impossible_version_is_refused(world, monkeypatch, message_bytes):
    """It changes nothing, and all ranks continue, whether weights take one message or several."""
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
        return worker.total()

    results, stats = serve(work, asynchronous())
    assert results == [11.0, 11.0]
    assert [counts.taken for counts in stats] == [11] * len(stats)


@one_server
def test_a_gradient_with_rows_out_of_range_is_refused(world, monkeypatch):
    """A worker with different variables could send it. Here, the worker doesn't select rows."""
    monkeypatch.setattr(gradients_module, "take_rows", lambda piece, spec, *rows: rows)

    def work(worker):
        worker.begin()
        rows = Rows(np.array([0, 1500]), np.full((2, 2), -1.0, "float32"))
        if worker.rank == 1:
            with pytest.raises(MismatchError, match="rows 0 to 1500 of a piece with 1500"):
                worker.client.push([rows, None, None], weight=1.0, learning_rate=math.nan)
        worker.push()
        return worker.total()

    results, (counts,) = serve(work, asynchronous())
    assert results == [2.0, 2.0]
    assert counts.taken == 2


@one_server
@pytest.mark.parametrize(("model", "total"), [(asynchronous(), 2.0), (synchronous(), 1.0)])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused(world, model, total, bad):
    """It changes nothing, and its worker may send another one."""

    def work(worker):
        worker.begin()
        dense = [np.full(shape, -1.0, "float32") for shape in SHAPES]
        dense[1][3] = bad
        rows = Rows(np.array([2, 1499]), np.array([[-1, -1], [-1, bad]], "float32"))
        if worker.rank == 1:
            for gradients in (dense, [rows, None, None]):
                message = "rank 2: Rank 1 sent a gradient with NaN or infinity: variable"
                with pytest.raises(NonFiniteError, match=message):
                    worker.client.push(gradients, weight=1.0, learning_rate=math.nan)
        worker.push()
        return worker.total()

    results, (counts,) = serve(work, model)
    assert results == [total] * 2
    assert counts.taken == 2


@one_or_two_servers
def test_gradients_that_are_not_finite_are_applied_if_allowed(world):
    def work(worker):
        worker.begin()
        if worker.rank == 1:
            worker.push(math.nan)
        return bool(np.isnan(worker.end()[0]).all())

    results, stats = serve(work, asynchronous(), require_finite=False)
    assert results == [True, True]
    assert [counts.taken for counts in stats] == [1] * len(stats)


@one_server
def test_staleness_counts_the_updates_during_a_step(world):
    def work(worker):
        worker.begin()
        if worker.rank == 0:
            worker.notify(1)
            worker.wait_for(1)
            worker.push()
        else:
            worker.wait_for(0)
            for _ in range(3):
                worker.push()
            worker.notify(0)
        return worker.total()

    results, (counts,) = serve(work, asynchronous())
    assert results == pytest.approx([4] * 2)
    assert counts.staleness == {0: 3, 3: 1}


@one_server
def test_a_worker_stops_waiting_for_one_that_is_behind_and_leaves(world):
    def work(worker):
        worker.begin()
        if worker.rank == 0:
            worker.push()
            worker.notify(1)
            worker.push()
            return [time.monotonic(), worker.total()]
        worker.wait_for(0)
        time.sleep(0.5)
        return [time.monotonic(), worker.total()]

    ((proceeded_s, total), (left_s, _)), _ = serve(work, asynchronous(1))
    assert proceeded_s > left_s
    assert total == 2.0


@one_or_two_servers
def test_synchronous_steps_apply_the_weighted_mean(world):
    """The mean includes the workers that have a gradient. Steps without any change nothing."""

    def work(worker):
        worker.begin()
        changes = []
        for step in [(-1.0, -4.0), (-1.0, None), (None, -8.0), (None, None), (-6.0, -6.0)]:
            weights = worker.push(step[worker.rank], weight=1.0 + worker.rank)
            changes.append(change(weights))
        return [*changes, worker.total()]

    results, stats = serve(work, synchronous())
    assert results == [[3.0, 4.0, 12.0, 12.0, 18.0, 18.0]] * 2
    for counts in stats:
        assert (counts.taken, counts.late, counts.updates) == (6, 0, 4)
        assert counts.staleness == {0: 4}


@one_server
def test_gradients_that_come_after_their_step_are_dropped(world):
    """With one gradient per step wanted, the second is dropped, and the next one is taken."""

    def work(worker):
        worker.begin()
        if worker.rank == 0:
            worker.wait_for(1)
            for _ in range(3):
                worker.push()
            worker.notify(1)
            worker.wait_for(1)
        else:
            worker.notify(0)
            worker.wait_for(0)
            assert change(worker.push(-100.0)) == 3.0
            assert change(worker.push(-10.0)) == 13.0
            worker.notify(0)
        return worker.total()

    results, (counts,) = serve(work, synchronous(1))
    assert results == [13.0, 13.0]
    assert (counts.taken, counts.late, counts.updates) == (4, 1, 4)


@one_server
def test_gradients_of_different_variables_are_refused(world):
    """The second worker gets an error, and the step has the first one's gradient."""

    def work(worker):
        worker.begin()
        gradients = [np.full(shape, -1.0, "float32") for shape in SHAPES]
        if worker.rank == 1:
            gradients[1:] = [None, None]
        refusal = ""
        try:
            worker.client.push(gradients, weight=1.0, learning_rate=math.nan)
        except MismatchError as error:
            refusal = str(error)
        return [refusal, [float(array.max()) - START for array in worker.end()]]

    ((first, weights), (second, others)), (counts,) = serve(work, synchronous())
    assert bool(first) != bool(second)
    assert "Workers have gradients for different variables" in first + second
    assert weights == others == ([1.0, 0.0, 0.0] if first else [1.0, 1.0, 1.0])
    assert (counts.taken, counts.updates) == (1, 1)


@one_server
def test_a_servers_memory_does_not_grow_with_updates(world):
    """MPI keeps 1 KB for each message that is never waited for."""
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
        return worker.total()

    _, stats = serve(work, asynchronous(), log=Memory())
    assert [counts.updates for counts in stats] == [3000]
    if state.collectives().rank not in WORKERS:
        assert resident[3000] - resident[500] < 2**20
