"""``hvdtrain bench predict``: predicts the duration of a training step on more hosts."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.bench.cost_model import Cluster, Costs, Step, failure_overhead, predict_step
from hvdtrain.bench.options import PredictOptions
from hvdtrain.bench.results import BenchReport, format_number, format_seconds
from hvdtrain.collectives.tuning import Link

__all__ = ["measure"]

GRADIENT_BYTES = 4
DAY_S = 86400.0


def measure(options: PredictOptions) -> None:
    """Print and write predictions for 1, 2, 4, ... hosts, up to ``options.hosts``."""
    ranks = options.hosts * options.ranks_per_host
    report = BenchReport("predict", options, ranks, lambda: True)
    costs = Costs(
        call_s=options.call_us * 1e-6,
        message_s=options.message_us * 1e-6,
        core_bytes_per_s=options.core,
        host_bytes_per_s=options.memory,
    )
    step = Step(
        compute_s=options.compute_ms * 1e-3,
        gradient_bytes=int(options.parameters * GRADIENT_BYTES),
        spread=options.spread,
    )
    link = Link(options.latency_us * 1e-6, options.link)
    predictions, steps, failures = [], [], []
    for hosts in _doubling(options.hosts):
        cluster = Cluster(
            hosts=hosts,
            ranks_per_host=options.ranks_per_host,
            link=link,
        )
        time = predict_step(costs, cluster, step)
        mean_s = options.host_days * DAY_S / hosts
        lost, interval_s = failure_overhead(
            mean_s=mean_s, checkpoint_s=options.checkpoint_s, restart_s=options.restart_s
        )
        efficiency = step.compute_s / time.seconds
        predictions.append(
            {"hosts": hosts, "ranks": cluster.ranks, **time._asdict(), "efficiency": efficiency}
            | {"between_failures_s": mean_s, "between_checkpoints_s": interval_s, "lost": lost}
        )
        size = [str(hosts), str(cluster.ranks)]
        parts = [time.seconds, time.waiting_s, time.combining_s]
        steps.append([*size, *map(format_seconds, parts), f"{100 * efficiency:.0f} %", time.limit])
        days, minutes = format_number(mean_s / DAY_S), format_number(interval_s / 60)
        failures.append([*size, f"{days} days", f"{minutes} min", f"{100 * lost:.2f} %"])
    report.print()
    head = ["hosts", "ranks", "step", "waiting", "reducing", "efficiency", "limit"]
    report.print_table(head, steps, left=(6,))
    report.print(
        "step: computing, waiting for the slowest rank, and reducing after the computation has\n"
        "ended; limit: the busiest resource of the last allreduce."
    )
    report.print()
    head = ["hosts", "ranks", "between failures", "between checkpoints", "lost time"]
    report.print_table(head, failures, left=())
    report.print("between checkpoints: the interval with the lowest cost.")
    report.add(predicted=predictions)
    report.finish(options.json)


def _doubling(most: int) -> Iterator[int]:
    """Yield the powers of two below ``most``, then ``most``. For example, 5 gives 1, 2, 4, 5."""
    hosts = 1
    while hosts < most:
        yield hosts
        hosts *= 2
    yield most
