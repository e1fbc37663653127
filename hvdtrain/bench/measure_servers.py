"""``hvdtrain bench servers`` on one rank: how many updates a second a parameter server makes.

The last rank is the server, all others are workers, which send the gradients of LeNet and take the
weights without computing anything. Short runs and copies take turns, so that whatever else the
machine does meets both alike.
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
from hvdtrain.parameter_server.optimizer_state import pack_states
from hvdtrain.parameter_server.published_weights import published_bytes, share_memory
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.sharding import shard_variables, specs_of
from hvdtrain.parameter_server.updates import ShardUpdates
from hvdtrain.parameter_server.variable_table import VariableTable

__all__ = ["COPIES", "measure"]

FEWEST_RANKS = 3
LEAST_SHARE_PERCENT = 50.0

# What one update asks of memory while the server attends to it; a copy reads and writes every
# byte once.
COPIES = {
    "the gradient comes in": 1.0,
    "weights and gradient are read, weights written": 1.5,
    "the weights are copied for workers": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The measurements with some of the workers; one entry for each run.

    Attributes:
        workers: How many.
        update_s: For an update, over all workers.
        copy_s: For a copy, right before.
        server_bytes: Memory of the server's own.
        server_resident_bytes: With what others share with it.
    """

    workers: int
    update_s: Sequence[float]
    copy_s: Sequence[float]
    server_bytes: int
    server_resident_bytes: int

    def speeds(self, statistic: Callable[[Sequence[float]], float]) -> tuple[float, float, float]:
        """Updates a second, those that the copies allow, and the one over the other in percent."""
        made = 1 / statistic(self.update_s)
        allowed = 1 / (sum(COPIES.values()) * statistic(self.copy_s))
        return made, allowed, 100 * made / allowed


def measure(options: ServersOptions) -> None:
    """Measure on the ranks that are there; the chief prints and writes."""
    hvdtrain.init()
    collectives = world.collectives()
    ranks = collectives.size
    if ranks < FEWEST_RANKS:
        raise ConfigurationError(
            f"servers needs two workers and a parameter server; received a job of {ranks} ranks, "
            f"expected {FEWEST_RANKS} or more."
        )
    report = BenchReport("servers", options, ranks, world.is_chief)
    runs = _Runs(collectives, options.updates)
    report.print(
        f"one server with {runs.shard.nbytes / 1e6:.3g} MB of variables; {options.runs} runs "
        f"of {options.updates} updates from each worker\n"
    )
    rows = [runs.measure(workers, options.runs) for workers in sorted({2, ranks - 1})]
    _show(report, rows, runs.shard.nbytes)
    report.finish(options.json)


class _Runs:
    """Runs of some workers and one server, with the same model; ``measure`` is collective.

    Args:
        collectives: The engine.
        updates: How many each worker makes in a run.
    """

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
        """Runs with the first ranks as workers; the first run does not count."""
        copy_s, update_s = [], []
        for _ in range(runs + 1):
            copy_s.append(self._copy())
            update_s.append(self._run(range(workers)))
        resident = own = 0.0
        if self._table is not None:
            resident = resident_bytes()
            own = resident - resident_shared_bytes() + published_bytes(self.shard.nbytes)
        own, resident = largest(self._collectives, own, resident)
        return _Row(
            workers=workers,
            update_s=update_s[1:],
            copy_s=copy_s[1:],
            server_bytes=int(own),
            server_resident_bytes=int(resident),
        )

    def _copy(self) -> float:
        """Seconds for copying the variables' bytes, by the server while all others wait."""
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
        """Seconds for an update, over all workers."""
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
        """Push as often as asked for; returns how long that took."""
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
            made, allowed, percent = row.speeds(statistic)
            speeds = f"{made:.0f}", f"{allowed:.0f}", f"{percent:.0f} %"
            cells.append([str(row.workers), name, *speeds, f"{row.server_bytes / 2**20:.0f} MiB"])
    head = ["workers", "runs", "updates/s", "copies allow", "share", "server's memory"]
    report.print_table(head, cells, left=())
    parts = "; ".join(f"{what} ({count:g})" for what, count in COPIES.items())
    report.print(
        f"copies allow: an update needs {sum(COPIES.values()):g} copies of {nbytes / 1e6:.3g} MB, "
        f"one after another, each {format_seconds(min(rows[0].copy_s))}:\n{parts}.\n"
        "server's memory: its own after the runs, Python and TensorFlow included, and not what\n"
        "workers share with it: each the buffer of its own gradient."
    )
    report.add(rows=[dataclasses.asdict(row) for row in rows], nbytes=nbytes)
    *_, percent = rows[0].speeds(min)
    what = "2 workers: updates a second over what copies allow, best"
    report.hold_against(what, percent, "at least", LEAST_SHARE_PERCENT, "%")
    if len(rows) > 1:
        what = f"server's memory with {rows[-1].workers} workers over that with 2"
        growth = rows[-1].server_bytes - rows[0].server_bytes
        report.hold_against(what, growth / 2**20, "at most", 2 * nbytes / 2**20, "MiB")
