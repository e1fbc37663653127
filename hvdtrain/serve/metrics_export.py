"""Metrics of all jobs for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from hvdtrain.jobs.files import last_json_line
from hvdtrain.serve.index import JobIndex

__all__ = ["export"]

# For each metric: its field in metrics.jsonl, and a description.
_JOB_METRICS = {
    "hvdtrain_job_step": ("step", "Completed optimizer steps."),
    "hvdtrain_job_epoch": ("epoch", "Epoch of the last step, from 0."),
    "hvdtrain_job_loss": ("loss", "Recent loss."),
    "hvdtrain_job_samples": ("samples", "Samples that all ranks have trained on."),
    "hvdtrain_job_own_step_seconds": (
        "own_s",
        "Duration of a step without waits for other ranks, median over the ranks.",
    ),
    "hvdtrain_job_reduced_bytes_per_second": (
        "reduced_bytes_per_s",
        "Bytes that all ranks contribute to allreduce per second.",
    ),
    "hvdtrain_job_slow_rank": ("slow", "Slow rank that the other ranks wait for."),
    "hvdtrain_job_slow_factor": (
        "slow_factor",
        "Step duration of the slow rank, relative to the usual duration.",
    ),
}
# For each metric: its field in ranks.jsonl, a description, and the factor that converts its unit.
_RANK_METRICS = {
    "hvdtrain_rank_step": ("step", "Completed optimizer steps.", 1),
    "hvdtrain_rank_own_step_seconds": (
        "own_s",
        "Duration of a step without waits for other ranks.",
        1,
    ),
    "hvdtrain_rank_waited_seconds": ("waited_s", "Total time waited for other ranks.", 1),
    "hvdtrain_rank_input_seconds": ("input_s", "Total time waited for input.", 1),
    "hvdtrain_rank_reduced_bytes": ("reduced_bytes", "Total bytes contributed to allreduce.", 1),
    "hvdtrain_rank_memory_bytes": ("rss_mb", "Resident memory.", 1 << 20),
    "hvdtrain_rank_cores": ("cpu", "Busy cores.", 1),
    "hvdtrain_rank_gpu_percent": ("gpu", "GPU utilization.", 1),
    "hvdtrain_rank_gpu_memory_bytes": ("gpu_mb", "GPU memory in use.", 1 << 20),
}
# Not "job", because Prometheus itself uses that label.
_LABEL = "hvdtrain_job"
_ACTIVE = ("running", "restarting", "silent")


def export(index: JobIndex, *, with_ranks: bool = False) -> bytes:
    """Return the text of ``/metrics``, with series for each running rank if ``with_ranks``."""
    registry = CollectorRegistry()
    registry.register(_JobCollector(index, with_ranks))
    return generate_latest(registry)


class _JobCollector(NamedTuple):
    """A collector for prometheus_client, which calls ``collect`` to get the metrics."""

    jobs: JobIndex
    with_ranks: bool

    def collect(self) -> Iterator[Metric]:
        """Yield the number of jobs in each state, and the metrics of active jobs."""
        views = self.jobs.views()
        counts = _gauge("hvdtrain_jobs", "Jobs by state.", "state")
        for status in sorted({view.status for view in views}):
            counts.add_metric([status], sum(view.status == status for view in views))
        yield counts
        active = [view for view in views if view.status in _ACTIVE]
        ranks = _gauge("hvdtrain_job_ranks", "Ranks of a job.", _LABEL)
        attempts = _gauge("hvdtrain_job_attempt", "Current attempt of a job.", _LABEL)
        metrics = {
            field: _gauge(name, text, _LABEL) for name, (field, text) in _JOB_METRICS.items()
        }
        rank_metrics = {
            field: (_gauge(name, text, _LABEL, "rank"), scale)
            for name, (field, text, scale) in _RANK_METRICS.items()
        }
        for view in active:
            ranks.add_metric([view.name], view.state.ranks)
            attempts.add_metric([view.name], view.state.attempt)
            if (folder := self.jobs.folder(view.name)) is None:
                continue
            row = last_json_line(folder.metrics)
            for field, family in metrics.items():
                _add(family, [view.name], row.get(field))
            if self.with_ranks:
                row = last_json_line(folder.ranks)
                for field, (family, scale) in rank_metrics.items():
                    for rank, value in enumerate(row.get(field, [])):
                        _add(family, [view.name, str(rank)], value, scale)
        yield from (ranks, attempts, *metrics.values())
        if self.with_ranks:
            yield from (family for family, _ in rank_metrics.values())


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _add(family: GaugeMetricFamily, labels: list[str], value: Any, scale: int = 1) -> None:
    if isinstance(value, (int, float)):
        family.add_metric(labels, value * scale)
