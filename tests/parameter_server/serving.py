"""A job of two workers and some servers, on real ranks."""

import math

import keras
import numpy as np

from hvdtrain import world as state
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.consistency import Asynchronous, Synchronous
from hvdtrain.parameter_server.optimizer_state import put_states, take_states
from hvdtrain.parameter_server.published_weights import share_memory
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.updates import ShardUpdates, StalenessStats
from hvdtrain.parameter_server.variable_table import VariableTable

WORKERS = (0, 1)
SHAPES = [(1500, 2), (5,), ()]
START = 3.0


class Worker:
    """One of the ranks that train."""

    def __init__(self, rank, client, signals, optimizer, shards):
        self.rank = rank
        self.client = client
        self.optimizer = optimizer
        self._signals = signals
        self._shards = shards

    def begin(self):
        """The first weights, which are the chief's."""
        if self.rank == 0:
            weights = [np.full(shape, START, "float32") for shape in SHAPES]
            self.client.load(weights, take_states(self.optimizer, self._shards))
        return self.client.pull()

    def push(self, gradient=-1.0, *, weight=1.0, rate=math.nan, ahead=False):
        """Send a gradient that is the same everywhere; None for none."""
        gradients = None
        if gradient is not None:
            gradients = [np.full(shape, gradient, "float32") for shape in SHAPES]
        return self.client.push(gradients, weight=weight, learning_rate=rate, ahead=ahead)

    def done(self, **options):
        """Where all weights are in the end, from where they began."""
        return went(self.last(**options))

    def last(self, **options):
        """All weights in the end."""
        if self.rank:
            return self.client.end(**options)
        states = [np.empty_like(s) for s in take_states(self.optimizer, self._shards)]
        weights = self.client.end(states=states, **options)
        put_states(self.optimizer, self._shards, states)
        return weights

    def tell(self, other):
        """Let another worker go on."""
        self._signals.wait(self._signals.start_send(np.ones(1), other, 1), "the test")

    def hear(self, other):
        """Wait until another worker tells."""
        self._signals.wait(self._signals.start_receive(np.ones(1), other, 1), "the test")


def went(weights):
    values = np.concatenate([array.reshape(-1) for array in weights]) - START
    assert (values == values[0]).all(), values
    return float(values[0])


def serve(work, consistency, *, optimizer=None, **options):
    """Let ranks 0 and 1 ``work`` and the others serve.

    Args:
        work: Called with a ``Worker``.
        consistency: Makes the consistency model of a server.
        optimizer: The model's.
        options: More, as for ``Server`` and ``ShardUpdates``.

    Returns:
        What ``work`` returned on each worker, and the servers' counts.
    """
    collectives = state.collectives()
    servers = tuple(range(len(WORKERS), collectives.size))
    variables = [keras.Variable(np.full(shape, 77.0, "float32")) for shape in SHAPES]
    optimizer = optimizer or keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    specs = specs_of(variables)
    shards = shard_variables(specs, len(servers))
    memory = share_memory(collectives, servers, shards)
    messages, signals = collectives.messages(), collectives.messages()
    if collectives.rank in WORKERS:
        client = Client(messages, specs, servers, shards, memory)
        said = work(Worker(collectives.rank, client, signals, optimizer, shards))
    else:
        shard = shards[servers.index(collectives.rank)]
        table = VariableTable(optimizer, shard, variables)
        log = options.pop("log", None)
        updates = ShardUpdates(table, memory.published[collectives.rank], log=log)
        server = Server(
            messages, updates, memory, workers=WORKERS, consistency=consistency(), **options
        )
        server.serve()
        said = updates.counts.to_json()
    everyone = collectives.allgather_object(said, name="what came of it")
    return everyone[:2], [StalenessStats.from_json(counts) for counts in everyone[2:]]


def free(bound=None):
    return lambda: Asynchronous(WORKERS, bound)


def rounds(wanted=None):
    return lambda: Synchronous(WORKERS, wanted)
