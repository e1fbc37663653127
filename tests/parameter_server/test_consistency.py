import math
import random

import pytest

from hvdtrain.parameter_server.consistency import Asynchronous, Synchronous, WorkerLiveness


def push(model, *workers):
    """Push a gradient for each worker's current step, and return which gradients are in time."""
    return [model.push(worker, model.next_step(worker)) for worker in workers]


def free(model, workers):
    return [worker for worker in workers if model.may_proceed(worker)]


def test_asynchronous_workers_do_not_wait_for_the_missed_steps_of_one_that_rejoins():
    model = Asynchronous([0, 1, 2], 1)
    model.leave(2)
    for _ in range(5):
        push(model, 0, 1)
    assert free(model, [0, 1]) == [0, 1]
    model.rejoin(2)
    assert model.next_step(2) == 0, "its own steps"
    push(model, 0)
    assert free(model, [0, 1, 2]) == [0, 1, 2]
    push(model, 0)
    assert not model.may_proceed(0), "it waits again"
    push(model, 1, 2)
    assert model.may_proceed(0)
    assert model.progress() == [7, 6, 1]


def test_synchronous_steps_wait_again_for_a_worker_that_rejoins():
    model = Synchronous([0, 1, 2])
    model.leave(2)
    push(model, 0, 1)
    assert model.complete()
    model.rejoin(2)
    assert not model.push(2, 0), "that step is over"
    assert push(model, 0, 1) == [True, True]
    assert not model.complete()
    assert push(model, 2) == [True]
    assert model.complete()


def test_a_synchronous_step_completes_when_all_workers_leave():
    model = Synchronous([0, 1, 2])
    push(model, 0)
    for worker in range(3):
        assert not model.complete()
        model.leave(worker)
    assert model.complete()
    assert not model.complete()


def test_progress():
    model = Asynchronous([0, 3, 5], None)
    push(model, 3, 3, 5)
    assert model.progress() == [model.next_step(worker) for worker in (0, 3, 5)] == [0, 2, 1]
    assert [model.would_exceed(worker, [1, 2, 2]) for worker in (0, 3, 5)] == [False, True, False]
    model = Synchronous([0, 1])
    push(model, 0, 1)
    assert model.progress() == [0, 0]
    model.complete()
    assert model.progress() == [1, 1]
    assert (model.would_exceed(0, [1, 1]), model.would_exceed(0, [2, 2])) == (True, False)


def test_with_backup_workers_servers_do_not_wait_for_each_other():
    """Servers may have taken different gradients."""
    model = Synchronous([0, 1, 2], wanted=2)
    push(model, 0, 1)
    model.complete()
    assert model.progress() == [0, 0, 0]
    assert model.would_exceed(2, [0, 0, 0])


class Simulation:
    """One server and workers of different speed, with random events.

    Args:
        model: The server's consistency model.
        steps: The number of gradients of each worker.
        speeds: The relative speed of each worker.
        seed: The seed of the random events.
    """

    def __init__(self, model, steps, speeds, seed):
        self.model = model
        self.left = dict(enumerate(steps))
        self.speeds = speeds
        self.pushed = dict.fromkeys(self.left, 0)
        self.step = dict.fromkeys(self.left, 0)
        self.busy = set(self.left)
        self.waiting = set()
        self.taken = self.late = self.completed = 0
        self._random = random.Random(seed)

    @property
    def active(self):
        return self.busy | self.waiting

    def events(self):
        """Yield after each event, until all workers are done."""
        while self.active:
            assert self.busy, f"all workers wait: {self.waiting}"
            busy = sorted(self.busy)
            (worker,) = self._random.choices(busy, [self.speeds[w] for w in busy])
            self.busy.remove(worker)
            if self.left[worker]:
                self._push(worker)
            else:
                self.model.leave(worker)
            self.completed += self.model.complete()
            for other in sorted(self.waiting):
                if self.model.may_proceed(other):
                    self.step[other] = self.model.next_step(other)
                    self.waiting.remove(other)
                    self.busy.add(other)
            yield

    def _push(self, worker):
        self.left[worker] -= 1
        self.pushed[worker] += 1
        if self.model.push(worker, self.step[worker]):
            self.taken += 1
        else:
            self.late += 1
        self.waiting.add(worker)


def random_workers(seed):
    """Return steps and speeds of random workers, some without gradients, some slow."""
    chance = random.Random(seed)
    steps = [chance.choice([0, 1, 10, 10, 12]) for _ in range(chance.randint(1, 5))]
    return steps, [chance.choice([1, 1, 10]) for _ in steps]


@pytest.mark.parametrize("bound", [None, 1, 3])
def test_asynchronous_workers_in_any_order(bound):
    for seed in range(200):
        steps, speeds = random_workers(seed)
        workers = Simulation(Asynchronous(range(len(steps)), bound), steps, speeds, seed)
        for _ in workers.events():
            slowest = min((workers.pushed[w] for w in workers.active), default=0)
            for worker in workers.active:
                ahead = workers.pushed[worker] - slowest
                assert (worker in workers.busy) == (bound is None or ahead <= bound)
        assert (workers.taken, workers.late, workers.completed) == (sum(steps), 0, 0)


@pytest.mark.parametrize("backup", [0, 1])
def test_synchronous_workers_in_any_order(backup):
    late = 0
    for seed in range(200):
        steps, speeds = random_workers(seed)
        most = len(steps) - backup
        if not most:
            continue
        workers = Simulation(Synchronous(range(len(steps)), most), steps, speeds, seed)
        completed = taken = 0
        for _ in workers.events():
            if workers.completed > completed:
                new = workers.taken - taken
                assert workers.completed == completed + 1
                assert max(1, min(most, len(workers.active))) <= new <= most
                completed, taken = workers.completed, workers.taken
        assert workers.taken + workers.late == sum(steps)
        assert workers.taken == taken, "every gradient taken is in a completed step"
        late += workers.late
        if not backup:
            assert workers.late == 0
            assert workers.completed == max(steps)
    assert late > 0 or not backup


def after_a_step(workers):
    """Return the liveness of workers that got the reply to their first step at time 0."""
    liveness = WorkerLiveness(workers, 5.0)
    for worker in workers:
        liveness.note_request(worker)
        liveness.stepped.add(worker)
        liveness.note_reply(worker, 0.0)
    return liveness


def test_workers_except_the_chief_become_silent_some_seconds_after_a_reply():
    liveness = after_a_step([0, 1, 2])
    liveness.note_request(2)
    liveness.note_reply(2, 3.0)
    assert liveness.next_silence_s == 5.0
    assert liveness.mark_silent(4.9) == []
    assert liveness.mark_silent(5.0) == [1]
    assert liveness.mark_silent(6.0) == [], "reported once"
    assert liveness.next_silence_s == 8.0
    assert liveness.training == {0, 1, 2}, "it may come back"
    assert liveness.note_request(1)
    assert not liveness.note_request(1)
    liveness.note_reply(1, 7.0)
    assert sorted(liveness.mark_silent(100.0)) == [1, 2]
    assert liveness.next_silence_s == math.inf


def test_a_worker_that_waits_for_a_reply_is_not_silent():
    liveness = after_a_step([0, 1])
    liveness.note_request(1)
    assert liveness.next_silence_s == math.inf
    assert liveness.mark_silent(1000.0) == []


def test_a_worker_is_not_silent_before_its_first_step():
    liveness = WorkerLiveness([0, 1], 5.0)
    liveness.note_request(1)
    liveness.note_reply(1, 0.0)
    assert liveness.next_silence_s == math.inf


def test_a_worker_that_is_done_is_not_silent():
    liveness = after_a_step([0, 1, 2])
    liveness.stop_training(1)
    liveness.disconnect(2)
    assert liveness.training == {0}
    assert liveness.connected == {0, 1}
    assert liveness.mark_silent(1000.0) == []
    liveness.note_reply(1, 0.0)
    assert liveness.next_silence_s == math.inf
