"""Metrics of all jobs in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from hvdtrain.jobs.files import last_json_line
from hvdtrain.serve.index import JobIndex

__all__ = ["export"]

# Name: what it is called in metrics.jsonl, and what it means.
_MEASURED = {
    "hvdtrain_job_step": ("step", "Optimizer steps that are complete."),
    "hvdtrain_job_epoch": ("epoch", "The epoch of the last step, from 0."),
    "hvdtrain_job_loss": ("loss", "The loss of late."),
    "hvdtrain_job_samples": ("samples", "Samples that all ranks have trained on."),
    "hvdtrain_job_own_step_seconds": ("own_s", "What a step takes the rank in the middle itself."),
    "hvdtrain_job_reduced_bytes_per_second": (
        "reduced_bytes_per_s",
        "What all ranks put into allreduce in a second.",
    ),
    "hvdtrain_job_slow_rank": ("slow", "The rank that the others wait for."),
    "hvdtrain_job_slow_factor": ("slow_factor", "How many times as long a step takes that one."),
}
# Of each rank: what it is called in ranks.jsonl, what it means, and how many of Prometheus' units
# one of those is.
_OF_RANKS = {
    "hvdtrain_rank_step": ("step", "Optimizer steps that are complete.", 1),
    "hvdtrain_rank_own_step_seconds": ("own_s", "What a step takes the rank itself.", 1),
    "hvdtrain_rank_waited_seconds": ("waited_s", "What it has waited for others in all.", 1),
    "hvdtrain_rank_input_seconds": ("input_s", "What it has waited for its batches in all.", 1),
    "hvdtrain_rank_reduced_bytes": ("reduced_bytes", "What it has put into allreduce in all.", 1),
    "hvdtrain_rank_memory_bytes": ("rss_mb", "Memory that it holds.", 1 << 20),
    "hvdtrain_rank_cores": ("cpu", "Cores that it keeps busy.", 1),
    "hvdtrain_rank_gpu_percent": ("gpu", "For how much of the time its GPUs compute.", 1),
    "hvdtrain_rank_gpu_memory_bytes": ("gpu_mb", "Memory that it takes of GPUs.", 1 << 20),
}
# Prometheus has a label "job" of its own, for whom it asks.
_LABEL = "hvdtrain_job"
_RUNS = ("running", "restarting", "silent")


class _Jobs:
    """The collector that prometheus_client asks for metrics."""

    def __init__(self, index: JobIndex, *, with_ranks: bool) -> None:
        self._index = index
        self._with_ranks = with_ranks

    def collect(self) -> Iterator[Metric]:
        """Yield how many jobs there are of each state, and how far those are that run."""
        views = self._index.views()
        counts = GaugeMetricFamily("hvdtrain_jobs", "Jobs, by their state.", labels=["state"])
        for status in sorted({view.status for view in views}):
            counts.add_metric([status], sum(view.status == status for view in views))
        yield counts
        running = [view for view in views if view.status in _RUNS]
        ranks = GaugeMetricFamily("hvdtrain_job_ranks", "Ranks of a job.", labels=[_LABEL])
        attempts = GaugeMetricFamily("hvdtrain_job_attempt", "Its attempt.", labels=[_LABEL])
        families = {
            field: GaugeMetricFamily(name, text, labels=[_LABEL])
            for name, (field, text) in _MEASURED.items()
        }
        for view in running:
            ranks.add_metric([view.name], view.state.ranks)
            attempts.add_metric([view.name], view.state.attempt)
            folder = self._index.folder(view.name)
            now = last_json_line(folder.metrics) if folder is not None else {}
            for field, family in families.items():
                if isinstance(now.get(field), (int, float)):
                    family.add_metric([view.name], now[field])
        yield from (ranks, attempts, *families.values())
        if self._with_ranks:
            yield from self._of_ranks([view.name for view in running])

    def _of_ranks(self, names: Sequence[str]) -> Iterator[Metric]:
        families = {
            field: (GaugeMetricFamily(name, text, labels=[_LABEL, "rank"]), scale)
            for name, (field, text, scale) in _OF_RANKS.items()
        }
        for name in names:
            folder = self._index.folder(name)
            now = last_json_line(folder.ranks) if folder is not None else {}
            for field, (family, scale) in families.items():
                for rank, value in enumerate(now.get(field, [])):
                    if isinstance(value, (int, float)):
                        family.add_metric([name, str(rank)], value * scale)
        for family, _ in families.values():
            yield family


def export(index: JobIndex, *, with_ranks: bool = False) -> bytes:
    """The text of ``/metrics``; with series of each rank of each job that runs if wanted."""
    registry = CollectorRegistry()
    registry.register(_Jobs(index, with_ranks=with_ranks))
    return generate_latest(registry)
