"""``hvdtrain bench servers`` on one rank: how many updates a second a parameter server makes.

The last rank is the server, all others are workers, which send the gradients of LeNet and take the
weights without computing anything.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.machine import describe_machine, machine_line, resident_bytes
from hvdtrain.bench.models import build_model
from hvdtrain.bench.options import ServersOptions
from hvdtrain.bench.report import Limit, Report, format_seconds, table
from hvdtrain.bench.timing import time_in_turn
from hvdtrain.collectives import Collectives
from hvdtrain.collectives.messages import Messages
from hvdtrain.errors import ConfigurationError
from hvdtrain.parameter_server.client import Client
from hvdtrain.parameter_server.handing import Slots, share_slots
from hvdtrain.parameter_server.holding import Holding, take_states
from hvdtrain.parameter_server.published import SharedWeights, share_weights
from hvdtrain.parameter_server.rules import FreeRunning
from hvdtrain.parameter_server.server import Server
from hvdtrain.parameter_server.shards import Shard, Spec, cut, specs_of

__all__ = ["COPIES", "measure"]

FEWEST_RANKS = 3
LEAST_SHARE_PERCENT = 50.0
COPY_REPETITIONS = 20

# What one update asks of memory while the server attends to it; a copy reads and writes every
# byte once.
COPIES = {
    "the gradient comes in": 1.0,
    "weights and gradient are read, weights written": 1.5,
    "the weights are copied for workers": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What was found with some of the workers."""

    workers: int
    best_update_s: float
    median_update_s: float
    server_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all runs have in common."""

    model: keras.Model
    specs: Sequence[Spec]
    shard: Shard
    weights: SharedWeights
    slots: Mapping[int, Slots]
    collectives: Collectives
    messages: Messages
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
    report = Report(
        "servers", {"machine": machine, "ranks": ranks, "options": dataclasses.asdict(options)}
    )
    model = build_model("lenet")
    model.optimizer.build(model.trainable_variables)
    specs = specs_of(model.trainable_variables)
    (shard,) = cut(specs, 1)
    weights = share_weights(collectives, [ranks - 1], [shard])
    job = _Job(
        model=model,
        specs=specs,
        shard=shard,
        weights=weights,
        slots=share_slots(collectives, [ranks - 1], [shard], weights.readers),
        collectives=collectives,
        messages=collectives.messages(),
        updates=options.updates,
    )
    if world.is_chief():
        report.print(f"hvdtrain bench servers: {ranks} ranks\n{machine_line(machine)}")
        report.print(
            f"one server with {shard.nbytes / 1e6:.3g} MB of variables; {options.runs} runs of "
            f"{options.updates} updates from each worker\n"
        )
    copy_s = _time_copy(job)
    rows = [_measure(job, workers, options.runs) for workers in sorted({2, ranks - 1})]
    if world.is_chief():
        _show(report, rows, copy_s, shard.nbytes)
        report.finish(options.json)


def _measure(job: _Job, workers: int, runs: int) -> _Row:
    """Runs with the first ranks as workers; the first run does not count."""
    update_s = [_run(job, range(workers)) for _ in range(runs + 1)][1:]
    mine = resident_bytes() if job.collectives.rank == job.server else 0
    occupied = job.collectives.allreduce(np.array([mine]), "max", name="hvdtrain bench: memory")
    return _Row(
        workers=workers,
        best_update_s=min(update_s),
        median_update_s=float(np.median(update_s)),
        server_bytes=int(occupied[0]),
    )


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
    optimizer, variables = job.model.optimizer, job.model.trainable_variables
    Server(
        job.messages,
        Holding(optimizer, job.shard, variables),
        job.shard,
        published=job.weights.published[job.server],
        readers=job.weights.readers,
        slots=job.slots,
        workers=workers,
        rule=FreeRunning(workers, bound=None),
        scale_by_staleness=False,
    ).serve()


def _work(job: _Job) -> float:
    """Push as often as asked for; returns how long that took."""
    published = job.weights.published
    client = Client(job.messages, job.specs, [job.server], [job.shard], published, job.slots)
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
    client.done(states=states if chief else None)
    return seconds


def _time_copy(job: _Job) -> float:
    """Seconds for copying the variables' bytes on the server's core while all others wait."""
    source = np.ones(job.shard.nbytes, np.uint8)
    target = np.empty_like(source)

    def copy() -> None:
        if job.collectives.rank == job.server:
            np.copyto(target, source)

    found = time_in_turn(job.collectives, {"copy": copy}, repetitions=COPY_REPETITIONS)
    return found["copy"].best_s


def _show(report: Report, rows: Sequence[_Row], copy_s: float, nbytes: int) -> None:
    copies = sum(COPIES.values())
    allowed = 1 / (copies * copy_s)
    cells = [
        [
            str(row.workers),
            f"{1 / row.best_update_s:.0f}",
            f"{1 / row.median_update_s:.0f}",
            f"{allowed:.0f}",
            f"{100 / row.best_update_s / allowed:.0f} %",
            f"{row.server_bytes / 2**20:.0f} MiB",
        ]
        for row in rows
    ]
    head = ["workers", "updates/s, best", "median", "copies allow", "share", "server's memory"]
    report.print(table(head, cells))
    parts = "; ".join(f"{what} ({count:g})" for what, count in COPIES.items())
    report.print(
        f"copies allow: an update needs {copies:g} copies of {nbytes / 1e6:.3g} MB, one after "
        f"another, each {format_seconds(copy_s)}:\n{parts}.\n"
        "server's memory: resident after the runs, Python and TensorFlow included."
    )
    report.add("rows", [dataclasses.asdict(row) for row in rows])
    report.add("copy_s", copy_s)
    report.hold_against(
        Limit(
            what="2 workers: updates a second over what copies allow, best",
            measured=100 / rows[0].best_update_s / allowed,
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
