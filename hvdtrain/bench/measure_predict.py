"""``hvdtrain bench predict``: a model of costs, asked for more hosts than there are."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.bench.cost_model import Cluster, Costs, Step, failure_overhead, predict_step
from hvdtrain.bench.options import PredictOptions
from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.collectives.link_speed import Link

__all__ = ["measure"]

GRADIENT_BYTES = 4
DAY_S = 86400.0


def measure(options: PredictOptions) -> None:
    """Print and write what is to be expected, from one host to all."""
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
    found, steps, failures = [], [], []
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
        found.append(
            {"hosts": hosts, "ranks": cluster.ranks, **time._asdict(), "efficiency": efficiency}
            | {"between_failures_s": mean_s, "between_checkpoints_s": interval_s, "lost": lost}
        )
        size = [str(hosts), str(cluster.ranks)]
        parts = [time.seconds, time.waiting_s, time.combining_s]
        steps.append([*size, *map(format_seconds, parts), f"{efficiency:.0%}", time.limit])
        days, minutes = f"{mean_s / DAY_S:.3g}", f"{interval_s / 60:.3g}"
        failures.append([*size, f"{days} days", f"{minutes} min", f"{lost:.2%}"])
    report.print()
    head = ["hosts", "ranks", "step", "for the slowest", "combining", "efficiency", "limit"]
    report.print_table(head, steps, left=(6,))
    report.print(
        "A step is a rank's computing, its waiting for the slowest, and what is left of combining\n"
        "gradients when computing is over. The limit is what the last allreduce takes its time for."
    )
    report.print()
    head = ["hosts", "ranks", "between failures", "between checkpoints", "lost to both"]
    report.print_table(head, failures, left=())
    report.print("Checkpoints are as far apart as costs least.")
    report.add(predicted=found)
    report.finish(options.json)


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and the most."""
    hosts = 1
    while hosts < most:
        yield hosts
        hosts *= 2
    yield most
