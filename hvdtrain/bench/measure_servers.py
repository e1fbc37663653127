"""``hvdtrain bench servers``: updates per second of a parameter server.

The rank with the highest number is the server. The other ranks are workers: they send gradients of
LeNet and receive weights, but compute nothing. Each short run follows a memory copy, so that other
load affects both equally.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.machine import resident_bytes, resident_shared_bytes
from hvdtrain.bench.models import build_model
from hvdtrain.bench.options import ServersOptions
from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.bench.timing import largest
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import ConfigurationError
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.consistency import Asynchronous
from hvdtrain.parameter_server.published_weights import published_bytes, share_memory
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.shard_optimizer import pack_states
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.updates import ShardUpdates
from hvdtrain.parameter_server.variable_table import VariableTable

__all__ = ["COPIES", "measure"]

MIN_RANKS = 3
MIN_SHARE_PERCENT = 50.0

# Memory traffic of one update on the server, as a multiple of copying all variables in memory. A
# copy reads and writes every byte once.
COPIES = {
    "receiving the gradient": 1.0,
    "reading weights and gradient, writing weights": 1.5,
    "copying the weights for workers": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Measurements for one number of workers, with one entry per run."""

    workers: int  # number of workers
    # duration of the run in seconds, divided by the updates of all workers
    update_s: Sequence[float]
    copy_s: Sequence[float]  # seconds per memory copy of the variables, measured before each run
    server_bytes: int  # private memory of the server
    server_resident_bytes: int  # resident memory of the server, including shared memory

    def speeds(self, statistic: Callable[[Sequence[float]], float]) -> tuple[float, float, float]:
        """Return updates per second, the limit of updates per second, and their ratio in percent.

        The limit follows from the time that a memory copy takes.
        """
        updates = 1 / statistic(self.update_s)
        limit = 1 / (sum(COPIES.values()) * statistic(self.copy_s))
        return updates, limit, 100 * updates / limit


def measure(options: ServersOptions) -> None:
    """Run the benchmark on all ranks. The chief prints and writes the results."""
    hvdtrain.init()
    collectives = world.collectives()
    ranks = collectives.size
    if ranks < MIN_RANKS:
        raise ConfigurationError(
            f"servers needs at least {MIN_RANKS} ranks, two workers and a server, got {ranks}; "
            "start more."
        )
    report = BenchReport("servers", options, ranks, world.is_chief)
    runs = _Runs(collectives, options.updates)
    report.print(
        f"one server with {runs.shard.nbytes / 1e6:.3g} MB of variables; {options.runs} runs "
        f"of {options.updates} updates per worker\n"
    )
    rows = [runs.measure(workers, options.runs) for workers in sorted({2, ranks - 1})]
    _show(report, rows, runs.shard.nbytes)
    report.finish(options.json)


class _Runs:
    """Runs of workers and one server with the same model."""

    def __init__(self, collectives: Engine, updates: int) -> None:
        self._collectives = collectives
        self._updates = updates
        self._model = build_model("lenet")
        variables = self._model.trainable_variables
        self._model.optimizer.build(variables)
        self._specs = specs_of(variables)
        (self.shard,) = shard_variables(self._specs, 1)
        self._server = collectives.size - 1
        self._table: VariableTable | None = None
        if collectives.rank == self._server:
            self._table = VariableTable(self._model.optimizer, self.shard, variables)
        self._memory = share_memory(collectives, [self._server], [self.shard])
        self._messages = collectives.messages()

    def measure(self, workers: int, runs: int) -> _Row:
        """Measure ``runs`` runs of the first ranks, after a warm-up. All ranks must call this."""
        copy_s, update_s = [], []
        for _ in range(runs + 1):
            copy_s.append(self._copy())
            update_s.append(self._run(range(workers)))
        resident = private = 0.0
        if self._table is not None:
            resident = resident_bytes()
            private = resident - resident_shared_bytes() + published_bytes(self.shard.nbytes)
        private, resident = largest(self._collectives, private, resident)
        return _Row(
            workers=workers,
            update_s=update_s[1:],
            copy_s=copy_s[1:],
            server_bytes=int(private),
            server_resident_bytes=int(resident),
        )

    def _copy(self) -> float:
        """Return how many seconds the server takes to copy the variables; other ranks wait."""
        self._collectives.barrier(name="hvdtrain bench")
        seconds = 0.0
        if self._table is not None:
            source = np.ones(self.shard.nbytes, np.uint8)
            target = np.ones_like(source)
            start = time.perf_counter()
            for _ in range(self._updates):
                np.copyto(target, source)
            seconds = time.perf_counter() - start
        (seconds,) = largest(self._collectives, seconds)
        return seconds / self._updates

    def _run(self, workers: range) -> float:
        """Return the duration of a run in seconds, divided by the updates of all workers."""
        seconds = 0.0
        self._collectives.barrier(name="hvdtrain bench")
        if self._table is not None:
            Server(
                self._messages,
                ShardUpdates(self._table, self._memory.published[self._server]),
                self._memory,
                workers=workers,
                consistency=Asynchronous(workers, bound=None),
            ).serve()
        elif self._collectives.rank in workers:
            seconds = self._work()
        (seconds,) = largest(self._collectives, seconds)
        return seconds / (self._updates * len(workers))

    def _work(self) -> float:
        """Send all gradients of this worker to the server, and return the duration in seconds."""
        client = Client(self._messages, self._specs, [self._server], [self.shard], self._memory)
        weights = [np.asarray(variable.numpy()) for variable in self._model.trainable_variables]
        states = pack_states(self._model.optimizer, [self.shard])
        chief = self._collectives.rank == 0
        if chief:
            client.load(weights, states)
        client.pull()
        gradients = [np.full_like(weight, 1e-3) for weight in weights]
        start = time.perf_counter()
        for _ in range(self._updates):
            client.push(gradients, weight=1.0, learning_rate=float("nan"))
        seconds = time.perf_counter() - start
        client.end(states=states if chief else None)
        return seconds


def _show(report: BenchReport, rows: Sequence[_Row], nbytes: int) -> None:
    cells = []
    for row in rows:
        for name, statistic in (("best", min), ("median", median)):
            updates, limit, percent = row.speeds(statistic)
            speeds = f"{updates:.0f}", f"{limit:.0f}", f"{percent:.0f} %"
            cells.append([str(row.workers), name, *speeds, f"{row.server_bytes / 2**20:.0f} MiB"])
    head = ["workers", "runs", "updates/s", "copies allow", "ratio", "server memory"]
    report.print_table(head, cells, left=())
    parts = "; ".join(f"{what} ({count:g})" for what, count in COPIES.items())
    report.print(
        "copies allow: updates per second if the speed of memory is the only limit. An update\n"
        f"needs {sum(COPIES.values()):g} copies of {nbytes / 1e6:.3g} MB in memory, and each takes "
        f"{format_seconds(min(rows[0].copy_s))}:\n{parts}.\n"
        "server memory: private memory after the runs, including Python and TensorFlow, without\n"
        "the workers' gradient buffers in shared memory."
    )
    report.add(rows=[dataclasses.asdict(row) for row in rows], nbytes=nbytes)
    *_, percent = rows[0].speeds(min)
    what = "2 workers: updates per second / limit by copies, best"
    report.compare(what, percent, "at least", MIN_SHARE_PERCENT, "%")
    if len(rows) > 1:
        what = f"server memory with {rows[-1].workers} workers, beyond that with 2"
        growth = rows[-1].server_bytes - rows[0].server_bytes
        report.compare(what, growth / 2**20, "at most", 2 * nbytes / 2**20, "MiB")
