"""Who may go on when, which gradients count, and who is waited for."""

import math
import random

import pytest

from hvdtrain.parameter_server.consistency import Asynchronous, Synchronous, WorkerLiveness


def pushed(rule, *workers):
    """What became of a gradient for the step at hand from each."""
    return [rule.push(worker, rule.next_step(worker)) for worker in workers]


def free(rule, workers):
    return [worker for worker in workers if rule.may_go_on(worker)]


def test_who_comes_back_is_not_behind():
    """Nobody waits until it has made up for the steps that it missed."""
    rule = Asynchronous([0, 1, 2], 1)
    rule.leave(2)
    for _ in range(5):
        pushed(rule, 0, 1)
    assert free(rule, [0, 1]) == [0, 1]
    rule.come_back(2)
    assert rule.next_step(2) == 0, "its own steps"
    pushed(rule, 0)
    assert free(rule, [0, 1, 2]) == [0, 1, 2]
    pushed(rule, 0)
    assert not rule.may_go_on(0), "but it is waited for again"
    pushed(rule, 1, 2)
    assert rule.may_go_on(0)
    assert rule.progress() == [7, 6, 1]


def test_rounds_with_who_comes_back():
    rule = Synchronous([0, 1, 2])
    rule.leave(2)
    pushed(rule, 0, 1)
    assert rule.complete()
    rule.come_back(2)
    assert not rule.push(2, 0), "that step is over"
    assert pushed(rule, 0, 1) == [True, True]
    assert not rule.complete(), "waited for again"
    assert pushed(rule, 2) == [True]
    assert rule.complete()


def test_round_of_who_has_left():
    """The last one to leave completes what is there."""
    rule = Synchronous([0, 1, 2])
    pushed(rule, 0)
    for worker in range(3):
        assert not rule.complete()
        rule.leave(worker)
    assert rule.complete()
    assert not rule.complete()


def test_progress_of_free_workers():
    rule = Asynchronous([0, 3, 5], None)
    pushed(rule, 3, 3, 5)
    assert rule.progress() == [rule.next_step(worker) for worker in (0, 3, 5)] == [0, 2, 1]
    assert [rule.is_beyond(worker, [1, 2, 2]) for worker in (0, 3, 5)] == [False, True, False]


def test_progress_of_rounds():
    rule = Synchronous([0, 1])
    pushed(rule, 0, 1)
    assert rule.progress() == [0, 0]
    rule.complete()
    assert rule.progress() == [1, 1]
    assert (rule.is_beyond(0, [1, 1]), rule.is_beyond(0, [2, 2])) == (True, False)


def test_progress_of_rounds_with_backup_workers():
    """Servers may have taken different gradients: none waits for another."""
    rule = Synchronous([0, 1, 2], wanted=2)
    pushed(rule, 0, 1)
    rule.complete()
    assert rule.progress() == [0, 0, 0]
    assert rule.is_beyond(2, [0, 0, 0])


class Workers:
    """Workers of different speed that a server deals with in any order.

    Args:
        rule: Of the server.
        steps: How many gradients each worker has.
        speeds: How soon each is done with a step, on average.
        seed: Of the order.
    """

    def __init__(self, rule, steps, speeds, seed):
        self.rule = rule
        self.left = dict(enumerate(steps))
        self.speeds = speeds
        self.pushed = dict.fromkeys(self.left, 0)
        self.step = dict.fromkeys(self.left, 0)
        self.busy = set(self.left)
        self.waiting = set()
        self.taken = self.late = self.rounds = 0
        self._random = random.Random(seed)

    @property
    def active(self):
        return self.busy | self.waiting

    def events(self):
        """Until all have ended; yields after each event."""
        while self.active:
            assert self.busy, f"nobody may go on: {self.waiting} wait"
            busy = sorted(self.busy)
            (worker,) = self._random.choices(busy, [self.speeds[w] for w in busy])
            self.busy.remove(worker)
            if self.left[worker]:
                self._push(worker)
            else:
                self.rule.leave(worker)
            self.rounds += self.rule.complete()
            for other in sorted(self.waiting):
                if self.rule.may_go_on(other):
                    self.step[other] = self.rule.next_step(other)
                    self.waiting.remove(other)
                    self.busy.add(other)
            yield

    def _push(self, worker):
        self.left[worker] -= 1
        self.pushed[worker] += 1
        if self.rule.push(worker, self.step[worker]):
            self.taken += 1
        else:
            self.late += 1
        self.waiting.add(worker)


def cases(seed):
    """Any number of workers, some without gradients, some much slower than others."""
    chance = random.Random(seed)
    steps = [chance.choice([0, 1, 10, 10, 12]) for _ in range(chance.randint(1, 5))]
    return steps, [chance.choice([1, 1, 10]) for _ in steps]


@pytest.mark.parametrize("bound", [None, 1, 3])
def test_any_order_of_free_workers(bound):
    for seed in range(200):
        steps, speeds = cases(seed)
        workers = Workers(Asynchronous(range(len(steps)), bound), steps, speeds, seed)
        for _ in workers.events():
            slowest = min((workers.pushed[w] for w in workers.active), default=0)
            for worker in workers.active:
                ahead = workers.pushed[worker] - slowest
                assert (worker in workers.busy) == (bound is None or ahead <= bound)
        assert (workers.taken, workers.late, workers.rounds) == (sum(steps), 0, 0)


@pytest.mark.parametrize("backup", [0, 1])
def test_any_order_of_rounds(backup):
    late = 0
    for seed in range(200):
        steps, speeds = cases(seed)
        most = len(steps) - backup
        if not most:
            continue
        workers = Workers(Synchronous(range(len(steps)), most), steps, speeds, seed)
        rounds = taken = 0
        for _ in workers.events():
            if workers.rounds > rounds:
                new = workers.taken - taken
                assert workers.rounds == rounds + 1
                assert max(1, min(most, len(workers.active))) <= new <= most
                rounds, taken = workers.rounds, workers.taken
        assert workers.taken + workers.late == sum(steps)
        assert workers.taken == taken, "all that was taken went into a round"
        late += workers.late
        if not backup:
            assert workers.late == 0
            assert workers.rounds == max(steps)
    assert late > 0 or not backup


def stepped(workers, *, now=0.0, silence_s=5.0):
    """All of them have made a step, and have the answer."""
    attendance = WorkerLiveness(workers, silence_s)
    for worker in workers:
        attendance.hear(worker)
        attendance.note_step(worker)
        attendance.answer(worker, now)
    return attendance


def test_silence():
    """Counted from the answer; the chief may take its time."""
    attendance = stepped([0, 1, 2])
    attendance.hear(2)
    attendance.answer(2, 3.0)
    assert attendance.next_silence == 5.0
    assert attendance.fall_silent(4.9) == []
    assert attendance.fall_silent(5.0) == [1]
    assert attendance.fall_silent(6.0) == [], "told once"
    assert attendance.next_silence == 8.0
    assert attendance.training == {0, 1, 2}, "it may come back"
    assert attendance.hear(1)
    assert not attendance.hear(1)
    attendance.answer(1, 7.0)
    assert sorted(attendance.fall_silent(100.0)) == [1, 2]
    assert attendance.next_silence == math.inf


def test_who_waits_for_an_answer_is_not_silent():
    attendance = stepped([0, 1])
    attendance.hear(1)
    assert attendance.next_silence == math.inf
    assert attendance.fall_silent(1000.0) == []


def test_the_first_step_may_take_its_time():
    attendance = WorkerLiveness([0, 1], 5.0)
    attendance.hear(1)
    attendance.answer(1, 0.0)
    assert attendance.next_silence == math.inf


def test_who_trains_no_more_is_not_waited_for():
    attendance = stepped([0, 1, 2])
    attendance.stop_training(1)
    attendance.end(2)
    assert attendance.training == {0}
    assert attendance.there == {0, 1}
    assert attendance.fall_silent(1000.0) == []
    attendance.answer(1, 0.0)
    assert attendance.next_silence == math.inf
