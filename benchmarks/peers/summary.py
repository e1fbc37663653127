"""Medians and ranges of the results as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdtrain.bench.results import format_seconds
from peers.plan import Sizes
from peers.ways import MEASURES, NOT_MEASURED, ON_CLUSTER, Way

__all__ = ["collect", "report", "show_values", "table"]

Show = Callable[[float], str]
# Values of all repetitions, by candidate and figure.
Values = dict[str, dict[str, list[float]]]

TITLES = {
    "allreduce": "Allreduce of float32, by size",
    "training": "Training, samples per second by the clock around `fit` or the loop",
    "startup": "From the command to the end of the first step",
    "memory": "Peak memory of rank 0, LeNet",
    "recovery": "From the kill of a rank to the end of the next step, LeNet",
}
NOTES = {
    "allreduce": "hvdtrain, MPI and torch add up arrays in their memory, MPI with one call per "
    "array; Horovod, hvdtrain.tensorflow and the ring add up TensorFlow tensors.",
    "training": "Efficiency is relative to the same number of independent processes of the same "
    "framework, each with one thread. Keras trains with `fit` and metrics; Horovod in a loop over "
    "a tf.function; torch in a loop over the same layers in torch. TensorFlow has two inter-op "
    "threads on four hosts, and one elsewhere.",
    "startup": "A tiny model, including imports and tracing.",
    "memory": "The peak resident set (VmHWM), including memory shared by ranks.",
    "recovery": "A restart starts all ranks again, here without a checkpoint.",
}
MODELS = {
    "lenet": "LeNet, batch 64",
    "mlp": "MLP of 80 MB, batch 64",
    "resnet50": "ResNet-50, 64x64, batch {batch}",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A table column: figure, heading and format."""

    figure: str
    head: str
    show: Show


def collect(entries: Sequence[Mapping[str, Any]], what: str, where: str) -> Values:
    """Return the values of one measure, in the order of the repetitions."""
    values: Values = {}
    for entry in entries:
        if (entry["what"], entry["where"]) == (what, where):
            figures = values.setdefault(entry["way"], {})
            for figure, value in entry.get("found", {}).items():
                figures.setdefault(figure, []).append(value)
    return values


def show_values(values: Sequence[float], show: Show) -> str:
    """Format the median, and the range if values differ."""
    if not values:
        return ""
    middle, lowest, highest = (show(value) for value in (median(values), min(values), max(values)))
    return middle if lowest == highest else f"{middle} ({lowest} to {highest})"


def table(labels: Mapping[str, str], values: Values, columns: Sequence[Column]) -> str:
    """Return a table with a row for each candidate, also if all of its jobs failed."""
    rows = ["| candidate | " + " | ".join(column.head for column in columns) + " |"]
    rows.append("|---" * (len(columns) + 1) + "|")
    for way, figures in values.items():
        cells = [show_values(figures.get(column.figure, []), column.show) for column in columns]
        if not figures:
            cells[0] = "failed"
        rows.append(f"| {labels[way]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def with_efficiency(values: Values, ways: Mapping[str, Way], ranks: int) -> Values:
    """Add the efficiency of each model in percent.

    It is relative to the median of the candidate's single processes.
    """
    result = {name: dict(figures) for name, figures in values.items()}
    for name, figures in values.items():
        single = values.get(ways[name].alone, {})
        for figure, speeds in figures.items():
            model, _, unit = figure.partition(" ")
            if unit == "samples_per_s" and single.get(figure):
                limit = ranks * median(single[figure])
                result[name][f"{model} percent"] = [100 * speed / limit for speed in speeds]
    return result


def report(
    whats: Sequence[str],
    wheres: Sequence[str],
    ways: Mapping[str, Way],
    unavailable: Mapping[str, str],
    entries: Sequence[Mapping[str, Any]],
    sizes: Sizes,
    ranks: int,
    links: str,
) -> str:
    """Return all tables, with notes about missing candidates.

    Args:
        whats: Names of measures.
        wheres: ``host``, ``cluster`` or both.
        ways: Candidates that ran.
        unavailable: Reasons of missing candidates.
        entries: Results of all jobs.
        sizes: Sizes of the measurements.
        ranks: Number of ranks on this host.
        links: Description of the cluster.
    """
    labels = {name: _label(way, entries) for name, way in ways.items()}
    parts = []
    for what in whats:
        source = "training" if what == "memory" else what
        for where in wheres:
            values = collect(entries, source, where)
            if not values or (where == "cluster" and what not in ON_CLUSTER):
                continue
            if what == "training":
                values = with_efficiency(values, ways, ranks)
            place = f"{ranks} ranks on one host" if where == "host" else links
            columns = columns_of(what, sizes)
            # The cluster measures some of the figures.
            present = [c for c in columns if any(c.figure in row for row in values.values())]
            shown = table(labels, values, present or columns[:1])
            missing = [unavailable[name] for name in MEASURES[what] if name in unavailable]
            missing += NOT_MEASURED.get(what, ())
            notes = [NOTES[what], *(f"Not measured: {reason}" for reason in missing)]
            lines = "\n".join(f"- {note}" for note in notes)
            parts.append(f"### {TITLES[what]}: {place}\n\n{shown}\n\n{lines}")
    return "\n\n".join(parts)


def columns_of(what: str, sizes: Sizes) -> list[Column]:
    """Return the columns of a measure's table."""
    if what == "allreduce":
        return [Column(figure=name, head=name, show=format_seconds) for name in sizes.cases]
    if what == "startup":
        return [Column(figure="first_step_s", head="seconds", show="{:.1f}".format)]
    if what == "recovery":
        return [
            Column(figure="kill_to_next_step_s", head="seconds", show="{:.2f}".format),
            Column(figure="first_step_s", head="fresh start", show="{:.2f}".format),
            Column(figure="times_start", head="ratio", show="{:.2f}".format),
        ]
    if what == "memory":
        return [Column(figure="lenet peak_bytes", head="rank 0", show=_mebibytes)]
    columns = []
    for name, (batch, _) in sizes.models.items():
        head = MODELS[name].format(batch=batch)
        columns.append(Column(figure=f"{name} samples_per_s", head=head, show="{:.0f}".format))
        percent: Show = "{:.0f} %".format
        columns.append(Column(figure=f"{name} percent", head="efficiency", show=percent))
    return columns


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _label(way: Way, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a candidate's label with the versions of its libraries."""
    for entry in entries:
        if entry["way"] == way.name and entry.get("versions"):
            names = ", ".join(f"{name} {text}" for name, text in entry["versions"].items())
            return f"{way.label} ({names})"
    return way.label
