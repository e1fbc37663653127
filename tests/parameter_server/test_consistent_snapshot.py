"""Snapshots that have the same gradients on all servers, for any order of messages."""

import random
from collections import deque

import pytest

from hvdtrain.parameter_server.consistency import Asynchronous, ConsistentSnapshot, Synchronous
from hvdtrain.parameter_server.protocol import Kind, Request

# In a server's inbox after the last message of a worker that died.
DEATH = None


class Server:
    """Handles requests as a server does, without the gradients."""

    def __init__(self, model, workers):
        self.model = model
        self.snapshot = ConsistentSnapshot(model, workers)
        self.inbox = {worker: deque() for worker in workers}
        self.waiting = set()
        self.taken = []  # (worker, number of its gradient), in order
        self.gathered = []

    def receive(self, worker):
        """Handle the next message of a worker."""
        request, number = self.inbox[worker].popleft()
        if request is DEATH:
            self.snapshot.drop_worker(worker)
            self.model.leave(worker)
            self.waiting.discard(worker)
            self.complete()
        elif not self.snapshot.hold(worker, request._replace(step=number)):
            self._handle(worker, request.kind, number)
        self.handle_held()

    def handle_held(self):
        while entry := self.snapshot.next_held():
            self._handle(entry[0], entry[1].kind, entry[1].step)

    def _handle(self, worker, kind, number):
        if kind is Kind.PUSH:
            self.model.push(worker, self.model.next_step(worker))
            self.waiting.add(worker)
            (self.gathered if self.model.gathers else self.taken).append((worker, number))
        else:
            self.model.leave(worker)
        self.complete()

    def complete(self):
        if self.snapshot.may_advance and self.model.complete():
            self.taken += self.gathered
            self.gathered = []

    def take_replies(self):
        """Return the workers that may proceed now."""
        free = {worker for worker in self.waiting if self.model.may_proceed(worker)}
        self.waiting -= free
        return free


class Job:
    """Workers and servers whose messages arrive in random order.

    Args:
        make_model: A function that creates a server's consistency model for some workers.
        steps: The number of gradients of each worker. The first worker is the chief.
        servers: The number of servers.
        seed: The seed of the random order.
        mortal: Whether workers other than the chief may die.
    """

    def __init__(self, make_model, steps, servers, seed, mortal):
        self.mortal = mortal
        self.dead = set()
        self.workers = range(len(steps))
        self.left = list(steps)
        self.sent = [0] * len(steps)
        self.replied = [set(range(servers)) for _ in steps]
        self.done = set()
        self.servers = [Server(make_model(self.workers), self.workers) for _ in range(servers)]
        self.random = random.Random(seed)

    def run(self, check):
        """Run until all workers are done. ``check`` gets this job between the chief's steps."""
        while moves := self._moves():
            self._make(*self.random.choice(moves))
            between = 0 in self.done or len(self.replied[0]) == len(self.servers)
            if between and self.random.random() < 0.3:
                check(self)
        assert len(self.done) == len(self.workers), "a worker waits forever"
        check(self)

    def snapshot(self):
        """Return the gradients that each server has applied at the moment of a snapshot."""
        progress = []
        for server in self.random.sample(self.servers, len(self.servers)):
            self._make_another_move()
            progress.append(server.snapshot.freeze())
        target = [max(column) for column in zip(*progress)]
        for server in self.random.sample(self.servers, len(self.servers)):
            self._make_another_move()
            server.snapshot.resume_to(target)
            server.complete()
        moments = {}
        while len(moments) < len(self.servers):
            for number, server in enumerate(self.servers):
                server.handle_held()
                if number not in moments and server.snapshot.reached:
                    moments[number] = sorted(server.taken)
                    server.snapshot.finish()
                    server.complete()
                    server.handle_held()
            self._deliver_replies()
            assert self._make_another_move() or len(moments) == len(self.servers), "stuck"
        return list(moments.values())

    def _moves(self):
        """Return the possible moves: a server receives from a worker, or a worker sends (None)."""
        arriving = [
            (number, worker)
            for number, server in enumerate(self.servers)
            for worker in self.workers
            if server.inbox[worker]
        ]
        sending = [
            (None, worker)
            for worker in self.workers
            if worker not in self.done and len(self.replied[worker]) == len(self.servers)
        ]
        return arriving + sending

    def _make(self, server, worker):
        if server is None:
            self._send(worker)
        else:
            self.servers[server].receive(worker)
            self._deliver_replies()

    def _make_another_move(self):
        """Make a random move while the chief waits for a snapshot. Return False if none is left."""
        moves = [move for move in self._moves() if move != (None, 0)]
        alive = [worker for worker in self.workers[1:] if worker not in self.done]
        if self.mortal and alive and self.random.random() < 0.05:
            self._kill(self.random.choice(alive))
            self._deliver_replies()
        if moves:
            self._make(*self.random.choice(moves))
        return bool(moves)

    def _deliver_replies(self):
        for number, server in enumerate(self.servers):
            for worker in server.take_replies():
                self.replied[worker].add(number)

    def _send(self, worker):
        """Send the next gradient, or leave."""
        push = self.left[worker] > 0
        self.left[worker] -= push
        self.sent[worker] += push
        if push:
            self.replied[worker] = set()
        else:
            self.done.add(worker)
        for server in self.servers:
            kind = Kind.PUSH if push else Kind.LEAVE
            server.inbox[worker].append((Request(kind), self.sent[worker]))

    def _kill(self, worker):
        """Kill a worker, whose last message reaches only some servers."""
        self.dead.add(worker)
        self.done.add(worker)
        for server in self.servers:
            inbox = server.inbox[worker]
            if inbox and self.random.random() < 0.5:
                inbox.pop()
            inbox.append((DEATH, 0))


@pytest.mark.parametrize("mortal", [False, True])
@pytest.mark.parametrize(
    "make_model",
    [
        lambda workers: Asynchronous(workers, None),
        lambda workers: Asynchronous(workers, 1),
        Synchronous,
    ],
    ids=["unbounded", "bound", "synchronous"],
)
def test_all_servers_have_the_same_gradients_in_a_snapshot(make_model, mortal):
    """Only the last gradients of workers that died may differ."""
    uneven = deaths = differing = 0

    def check(job):
        nonlocal uneven, differing
        uneven += len({len(server.taken) for server in job.servers}) > 1
        first, *others = job.snapshot()
        for other in others:
            difference = set(first) ^ set(other)
            differing += bool(difference)
            assert {worker for worker, _ in difference} <= job.dead
            assert len(difference) <= len(job.dead)

    for seed in range(300):
        chance = random.Random(seed)
        workers = chance.randint(1 + mortal, 4)
        steps = [chance.choice([1, 6, 9] if mortal else [0, 1, 6, 9]) for _ in range(workers)]
        job = Job(make_model, steps, chance.randint(1, 3), seed, mortal)
        job.run(check)
        deaths += len(job.dead)
        if not mortal:
            for server in job.servers:
                assert len(server.taken) == sum(steps)
    assert uneven > 20
    assert (deaths > 20, differing > 5) == (mortal, mortal)
