"""A job of two workers and one or more parameter servers, on real ranks."""

import math

import keras
import numpy as np

from hvdtrain import world as state
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.consistency import Asynchronous, Synchronous
from hvdtrain.parameter_server.published_weights import share_memory
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.shard_optimizer import pack_states, unpack_states
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.updates import ShardUpdates, StalenessStats
from hvdtrain.parameter_server.variable_table import VariableTable
from hvdtrain.private_api.keras import moving_averages

WORKERS = (0, 1)
SHAPES = [(1500, 2), (5,), ()]
START = 3.0


class Worker:
    """A rank that trains."""

    def __init__(self, rank, client, signals, optimizer, shards):
        self.rank = rank
        self.client = client
        self.optimizer = optimizer
        self._signals = signals
        self._shards = shards

    def begin(self):
        """Load the weights, as the chief, and return the initial ones."""
        if self.rank == 0:
            weights = [np.full(shape, START, "float32") for shape in SHAPES]
            self.client.load(weights, pack_states(self.optimizer, self._shards))
        return self.client.pull()

    def push(self, gradient=-1.0, *, weight=1.0, rate=math.nan, overlap=False):
        """Send a gradient with this value everywhere, or no gradient for None."""
        gradients = None
        if gradient is not None:
            gradients = [np.full(shape, gradient, "float32") for shape in SHAPES]
        return self.client.push(gradients, weight=weight, learning_rate=rate, overlap=overlap)

    def averages(self):
        """Return the moving averages of the weights, and the bytes received for them."""
        averages = pack_states(self.optimizer, self._shards, averages_only=True)
        messages, sizes = self.client._messages, []
        receive = messages.start_receive

        def counted(buffer, *arguments):
            sizes.append(buffer.nbytes)
            return receive(buffer, *arguments)

        messages.start_receive = counted
        self.client.averages(averages)
        messages.start_receive = receive
        unpack_states(self.optimizer, self._shards, averages, averages_only=True)
        return [v.numpy() for v in moving_averages(self.optimizer)], sum(sizes)

    def end(self, **options):
        """Return the final weights."""
        if self.rank:
            return self.client.end(**options)
        states = [np.empty_like(s) for s in pack_states(self.optimizer, self._shards)]
        weights = self.client.end(states=states, **options)
        unpack_states(self.optimizer, self._shards, states)
        return weights

    def total(self, **options):
        """Return how much all weights have changed at the end."""
        return change(self.end(**options))

    def notify(self, other):
        self._signals.wait(self._signals.start_send(np.ones(1), other, 1), "the test")

    def wait_for(self, other):
        """Wait until another worker calls ``notify``."""
        self._signals.wait(self._signals.start_receive(np.ones(1), other, 1), "the test")


def change(weights):
    """Return how much all weights have changed, which must be the same for all of them."""
    values = np.concatenate([array.reshape(-1) for array in weights]) - START
    assert (values == values[0]).all(), values
    return float(values[0])


def serve(work, consistency, *, optimizer=None, **options):
    """Call ``work`` with a ``Worker`` on ranks 0 and 1, and run servers on the other ranks.

    Args:
        work: A function of a worker, whose results are returned.
        consistency: A function that returns a server's consistency model.
        optimizer: The model's optimizer.
        options: Other arguments of ``Server`` and ``ShardUpdates``.

    Returns:
        The result of each worker, and the statistics of each server.
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
        result = work(Worker(collectives.rank, client, signals, optimizer, shards))
    else:
        shard = shards[servers.index(collectives.rank)]
        table = VariableTable(optimizer, shard, variables)
        log = options.pop("log", None)
        updates = ShardUpdates(table, memory.published[collectives.rank], log=log)
        server = Server(
            messages, updates, memory, workers=WORKERS, consistency=consistency(), **options
        )
        server.serve()
        result = updates.counts.to_json()
    results = collectives.allgather_object(result, name="results")
    return results[:2], [StalenessStats.from_json(counts) for counts in results[2:]]


def asynchronous(bound=None):
    return lambda: Asynchronous(WORKERS, bound)


def synchronous(wanted=None):
    return lambda: Synchronous(WORKERS, wanted)
