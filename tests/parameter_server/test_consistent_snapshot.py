"""A snapshot holds the same gradients on all servers, whatever order messages come in."""

import random
from collections import deque

import pytest

from hvdtrain.parameter_server.consistency import Asynchronous, ConsistentSnapshot, Synchronous
from hvdtrain.parameter_server.protocol import Kind, Request

# What a server has of a worker that died, after the last message that came.
DEATH = None


class Server:
    """What a server does with requests, without the gradients."""

    def __init__(self, rule, workers):
        self.rule = rule
        self.freezing = ConsistentSnapshot(rule, workers)
        self.inbox = {worker: deque() for worker in workers}
        self.waiting = set()
        self.taken = []  # (worker, number of its gradient), in order
        self.gathered = []

    def work(self, worker):
        """Take up what has come from a worker."""
        request, number = self.inbox[worker].popleft()
        if request is DEATH:
            self._lose(worker)
        elif not self.freezing.holds(worker, request._replace(step=number)):
            self._carry_out(worker, request.kind, number)
        self.take_up_held()

    def _lose(self, worker):
        self.freezing.lose(worker)
        self.rule.leave(worker)
        self.waiting.discard(worker)
        self.complete()

    def take_up_held(self):
        """What need not wait any more."""
        while held := self.freezing.next_held():
            self._carry_out(held[0], held[1].kind, held[1].step)

    def _carry_out(self, worker, kind, number):
        if kind is Kind.PUSH:
            self.rule.push(worker, self.rule.next_step(worker))
            self.waiting.add(worker)
            (self.gathered if self.rule.gathers else self.taken).append((worker, number))
        else:
            self.rule.leave(worker)
        self.complete()

    def complete(self):
        if self.freezing.may_advance and self.rule.complete():
            self.taken += self.gathered
            self.gathered = []

    def answers(self):
        """Who may go on now."""
        free = {worker for worker in self.waiting if self.rule.may_go_on(worker)}
        self.waiting -= free
        return free


class Job:
    """Workers and servers whose messages come in any order.

    Args:
        rule: Makes a rule for some workers.
        steps: How many gradients each worker has; the first is the chief.
        servers: How many there are.
        seed: Of the order.
        mortal: Whether workers other than the chief may die.
    """

    def __init__(self, rule, steps, servers, seed, mortal=False):
        self.mortal = mortal
        self.dead = set()
        self.workers = range(len(steps))
        self.left = list(steps)
        self.sent = [0] * len(steps)
        self.answered = [set(range(servers)) for _ in steps]
        self.gone = set()
        self.servers = [Server(rule(self.workers), self.workers) for _ in range(servers)]
        self.random = random.Random(seed)

    def run(self, snapshot):
        """Until all have left; the chief calls ``snapshot`` between its steps, and afterwards."""
        while moves := self._moves():
            self._make(*self.random.choice(moves))
            between = 0 in self.gone or len(self.answered[0]) == len(self.servers)
            if between and self.random.random() < 0.3:
                snapshot(self)
        assert len(self.gone) == len(self.workers), "somebody waits in vain"
        snapshot(self)

    def _moves(self):
        """What may happen next: a server takes a worker's message up, or with None one sends."""
        arriving = [
            (number, worker)
            for number, server in enumerate(self.servers)
            for worker in self.workers
            if server.inbox[worker]
        ]
        sending = [
            (None, worker)
            for worker in self.workers
            if worker not in self.gone and len(self.answered[worker]) == len(self.servers)
        ]
        return arriving + sending

    def _make(self, server, worker):
        if server is None:
            self.send(worker)
        else:
            self.servers[server].work(worker)
            self.release()

    def release(self):
        for number, server in enumerate(self.servers):
            for worker in server.answers():
                self.answered[worker].add(number)

    def send(self, worker):
        """The next gradient, or that there is none."""
        push = self.left[worker] > 0
        self.left[worker] -= push
        self.sent[worker] += push
        if push:
            self.answered[worker] = set()
        else:
            self.gone.add(worker)
        for server in self.servers:
            kind = Kind.PUSH if push else Kind.LEAVE
            server.inbox[worker].append((Request(kind), self.sent[worker]))

    def die(self, worker):
        """With a message that may have come to some servers, and not to others."""
        self.dead.add(worker)
        self.gone.add(worker)
        for server in self.servers:
            inbox = server.inbox[worker]
            if inbox and self.random.random() < 0.5:
                inbox.pop()
            inbox.append((DEATH, 0))

    def snapshot(self):
        """What each server has applied at the moment; the chief does nothing else meanwhile."""
        far = []
        for number in self.shuffled():
            self._go_on()
            far.append(self.servers[number].freezing.begin())
        limit = [max(column) for column in zip(*far)]
        for number in self.shuffled():
            self._go_on()
            self.servers[number].freezing.aim(limit)
            self.servers[number].complete()
        moments = {}
        while len(moments) < len(self.servers):
            for number, server in enumerate(self.servers):
                server.take_up_held()
                if number not in moments and server.freezing.reached:
                    moments[number] = sorted(server.taken)
                    server.freezing.end()
                    server.complete()
                    server.take_up_held()
            self.release()
            assert self._go_on() or len(moments) == len(self.servers), "no such moment comes"
        return list(moments.values())

    def shuffled(self):
        return self.random.sample(range(len(self.servers)), len(self.servers))

    def _go_on(self):
        """Something may happen beside what the chief does; whether anything could."""
        moves = [move for move in self._moves() if move != (None, 0)]
        alive = [worker for worker in self.workers[1:] if worker not in self.gone]
        if self.mortal and alive and self.random.random() < 0.05:
            self.die(self.random.choice(alive))
            self.release()
        if moves:
            self._make(*self.random.choice(moves))
        return bool(moves)


@pytest.mark.parametrize(
    "rule",
    [
        lambda workers: Asynchronous(workers, None),
        lambda workers: Asynchronous(workers, 1),
        Synchronous,
    ],
    ids=["free", "bound", "rounds"],
)
def test_any_order(rule):
    uneven = 0

    def check(job):
        nonlocal uneven
        uneven += len({len(server.taken) for server in job.servers}) > 1
        first, *others = job.snapshot()
        assert all(other == first for other in others)

    for seed in range(300):
        chance = random.Random(seed)
        steps = [chance.choice([0, 1, 6, 9]) for _ in range(chance.randint(1, 4))]
        job = Job(rule, steps, chance.randint(1, 3), seed)
        job.run(check)
        for server in job.servers:
            assert len(server.taken) == sum(steps)
    assert uneven > 20


@pytest.mark.parametrize(
    "rule",
    [
        lambda workers: Asynchronous(workers, None),
        lambda workers: Asynchronous(workers, 1),
        Synchronous,
    ],
    ids=["free", "bound", "rounds"],
)
def test_workers_that_die(rule):
    """The moment comes, and is the same but for the last gradient of who died."""
    deaths = torn = 0

    def check(job):
        nonlocal torn
        first, *others = job.snapshot()
        for other in others:
            differing = set(first) ^ set(other)
            torn += bool(differing)
            assert {worker for worker, _ in differing} <= job.dead
            assert len(differing) <= len(job.dead)

    for seed in range(300):
        chance = random.Random(seed)
        steps = [chance.choice([1, 6, 9]) for _ in range(chance.randint(2, 4))]
        job = Job(rule, steps, chance.randint(1, 3), seed, mortal=True)
        job.run(check)
        deaths += len(job.dead)
    assert deaths > 20
    assert torn > 5
