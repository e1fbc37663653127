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

import keras
import numpy as np

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.machine import (
    describe_machine,
    machine_line,
    resident_bytes,
    resident_shared_bytes,
)
from hvdtrain.bench.models import build_model
from hvdtrain.bench.options import ServersOptions
from hvdtrain.bench.results import BenchReport, Limit, format_seconds
from hvdtrain.cluster.ranges import format_table
from hvdtrain.collectives import Collectives
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.errors import ConfigurationError
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.consistency import Asynchronous
from hvdtrain.parameter_server.optimizer_state import take_states
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.sharding import Shard, Spec, shard_variables, specs_of
from hvdtrain.parameter_server.shared_memory import SharedMemory, published_bytes, share_memory
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
    """What was found with some of the workers; one entry for each run.

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

    def updates_per_s(self, statistic: Callable[[Sequence[float]], float]) -> float:
        """How many updates the server made."""
        return 1 / statistic(self.update_s)

    def copies_allow(self, statistic: Callable[[Sequence[float]], float]) -> float:
        """Updates a second, if they were nothing but their copies."""
        return 1 / (sum(COPIES.values()) * statistic(self.copy_s))

    def percent(self, statistic: Callable[[Sequence[float]], float]) -> float:
        """The one over the other."""
        return 100 * self.updates_per_s(statistic) / self.copies_allow(statistic)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all runs have in common; ``table`` is the server's alone."""

    model: keras.Model
    specs: Sequence[Spec]
    shard: Shard
    table: VariableTable | None
    memory: SharedMemory
    collectives: Collectives
    messages: PointToPoint
    updates: int

    @property
    def server(self) -> int:
        """The rank that serves."""
        return self.collectives.size - 1


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
    machine = describe_machine()
    report = BenchReport(
        "servers", {"machine": machine, "ranks": ranks, "options": dataclasses.asdict(options)}
    )
    job = _prepare(collectives, options.updates)
    if world.is_chief():
        report.print(f"hvdtrain bench servers: {ranks} ranks\n{machine_line(machine)}")
        report.print(
            f"one server with {job.shard.nbytes / 1e6:.3g} MB of variables; {options.runs} runs "
            f"of {options.updates} updates from each worker\n"
        )
    rows = [_measure(job, workers, options.runs) for workers in sorted({2, ranks - 1})]
    if world.is_chief():
        _show(report, rows, job.shard.nbytes)
        report.finish(options.json)


def _prepare(collectives: Collectives, updates: int) -> _Job:
    model = build_model("lenet")
    model.optimizer.build(model.trainable_variables)
    specs = specs_of(model.trainable_variables)
    (shard,) = shard_variables(specs, 1)
    server = collectives.size - 1
    serves = collectives.rank == server
    return _Job(
        model=model,
        specs=specs,
        shard=shard,
        table=VariableTable(model.optimizer, shard, model.trainable_variables) if serves else None,
        memory=share_memory(collectives, [server], [shard]),
        collectives=collectives,
        messages=collectives.messages(),
        updates=updates,
    )


def _measure(job: _Job, workers: int, runs: int) -> _Row:
    """Runs with the first ranks as workers; the first run does not count."""
    copy_s, update_s = [], []
    for _ in range(runs + 1):
        copy_s.append(_copy(job))
        update_s.append(_run(job, range(workers)))
    resident = own = 0
    if job.collectives.rank == job.server:
        resident = resident_bytes()
        own = resident - resident_shared_bytes() + published_bytes(job.shard.nbytes)
    occupied = job.collectives.allreduce(np.array([own, resident]), "max", name="hvdtrain bench")
    return _Row(
        workers=workers,
        update_s=update_s[1:],
        copy_s=copy_s[1:],
        server_bytes=int(occupied[0]),
        server_resident_bytes=int(occupied[1]),
    )


def _copy(job: _Job) -> float:
    """Seconds for copying the variables' bytes, by the server while all others wait."""
    job.collectives.barrier(name="hvdtrain bench")
    seconds = 0.0
    if job.collectives.rank == job.server:
        source = np.ones(job.shard.nbytes, np.uint8)
        target = np.ones_like(source)
        start = time.perf_counter()
        for _ in range(job.updates):
            np.copyto(target, source)
        seconds = time.perf_counter() - start
    slowest = job.collectives.allreduce(np.array([seconds]), "max", name="hvdtrain bench")
    return float(slowest[0]) / job.updates


def _run(job: _Job, workers: range) -> float:
    """Seconds for an update, over all workers; collective."""
    rank, seconds = job.collectives.rank, 0.0
    job.collectives.barrier(name="hvdtrain bench")
    if rank == job.server:
        _serve(job, workers)
    elif rank in workers:
        seconds = _work(job)
    slowest = job.collectives.allreduce(np.array([seconds]), "max", name="hvdtrain bench")
    return float(slowest[0]) / (job.updates * len(workers))


def _serve(job: _Job, workers: range) -> None:
    assert job.table is not None
    Server(
        job.messages,
        ShardUpdates(job.table, job.memory.published[job.server]),
        job.memory,
        workers=workers,
        consistency=Asynchronous(workers, bound=None),
    ).serve()


def _work(job: _Job) -> float:
    """Push as often as asked for; returns how long that took."""
    client = Client(job.messages, job.specs, [job.server], [job.shard], job.memory)
    weights = [np.asarray(variable.numpy()) for variable in job.model.trainable_variables]
    states = take_states(job.model.optimizer, [job.shard])
    chief = job.collectives.rank == 0
    if chief:
        client.load(weights, states)
    client.pull()
    gradients = [np.full_like(weight, 1e-3) for weight in weights]
    start = time.perf_counter()
    for _ in range(job.updates):
        client.push(gradients, weight=1.0, learning_rate=float("nan"))
    seconds = time.perf_counter() - start
    client.end(states=states if chief else None)
    return seconds


def _show(report: BenchReport, rows: Sequence[_Row], nbytes: int) -> None:
    cells = [
        [
            str(row.workers),
            name,
            f"{row.updates_per_s(statistic):.0f}",
            f"{row.copies_allow(statistic):.0f}",
            f"{row.percent(statistic):.0f} %",
            f"{row.server_bytes / 2**20:.0f} MiB",
        ]
        for row in rows
        for name, statistic in (("best", min), ("median", median))
    ]
    head = ["workers", "runs", "updates/s", "copies allow", "share", "server's memory"]
    report.print(format_table(head, cells))
    parts = "; ".join(f"{what} ({count:g})" for what, count in COPIES.items())
    report.print(
        f"copies allow: an update needs {sum(COPIES.values()):g} copies of {nbytes / 1e6:.3g} MB, "
        f"one after another, each {format_seconds(min(rows[0].copy_s))}:\n{parts}.\n"
        "server's memory: its own after the runs, Python and TensorFlow included, and not what\n"
        "workers share with it: each the buffer of its own gradient."
    )
    report.add("rows", [dataclasses.asdict(row) for row in rows])
    report.hold_against(
        Limit(
            what="2 workers: updates a second over what copies allow, best",
            measured=rows[0].percent(min),
            limit=LEAST_SHARE_PERCENT,
            unit="%",
            bound="at least",
        )
    )
    if len(rows) > 1:
        report.hold_against(
            Limit(
                what=f"server's memory with {rows[-1].workers} workers over that with 2",
                measured=(rows[-1].server_bytes - rows[0].server_bytes) / 2**20,
                limit=2 * nbytes / 2**20,
                unit="MiB",
                bound="at most",
            )
        )
