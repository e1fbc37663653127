"""Medians and ranges of the results as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from hvdtrain.bench.results import format_seconds
from peers.candidates import ALONE, MEASURES, ON_CLUSTER, Way
from peers.jobs import RANKS, Sizes

Show = Callable[[float], str]
# Values of all repetitions, by candidate and figure.
Values = dict[str, dict[str, list[float]]]


class Column(NamedTuple):
    """A table column: figure, heading and format."""

    figure: str
    head: str
    show: Show


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
    "recovery": "A restart starts all ranks again, here without a checkpoint. Not measured: "
    "Horovod's elastic mode: it removes the whole host of a dead worker, so on one host its job "
    "ends (horovod/runner/elastic/registration.py, `_on_workers_recorded`).",
}
MODELS = {
    "lenet": "LeNet, batch {}",
    "mlp": "MLP of 80 MB, batch {}",
    "resnet50": "ResNet-50, 64x64, batch {}",
}
COLUMNS = {
    "startup": [Column("first_step_s", "seconds", "{:.1f}".format)],
    "memory": [Column("lenet peak_bytes", "rank 0", lambda size: f"{size / 2**20:.0f} MiB")],
    "recovery": [
        Column("kill_to_next_step_s", "seconds", "{:.2f}".format),
        Column("first_step_s", "fresh start", "{:.2f}".format),
        Column("times_start", "ratio", "{:.2f}".format),
    ],
}


def columns_of(what: str, sizes: Sizes) -> list[Column]:
    """Return the columns of a measure's table."""
    if what == "allreduce":
        return [Column(name, name, format_seconds) for name in sizes.cases]
    if what != "training":
        return COLUMNS[what]
    columns = []
    for name, (batch, _) in sizes.models.items():
        speed = Column(f"{name} samples_per_s", MODELS[name].format(batch), "{:.0f}".format)
        columns += [speed, Column(f"{name} percent", "efficiency", "{:.0f} %".format)]
    return columns


def collect(entries: Sequence[Mapping[str, Any]], what: str, where: str) -> Values:
    """Return the values of one measure, in the order of the repetitions."""
    values: Values = {}
    for entry in entries:
        if (entry["what"], entry["where"]) == (what, where):
            figures = values.setdefault(entry["way"], {})
            for figure, value in entry.get("found", {}).items():
                figures.setdefault(figure, []).append(value)
    return values


def with_efficiency(values: Values, ways: Mapping[str, Way], ranks: int) -> Values:
    """Add the efficiency of each model in percent.

    It is relative to the median of the candidate's single processes.
    """
    result = {name: dict(figures) for name, figures in values.items()}
    for name, figures in values.items():
        single = values.get(ALONE[ways[name].environment], {})
        for figure, speeds in figures.items():
            model, _, unit = figure.partition(" ")
            parallel = ways[name].launcher != "alone"
            if parallel and unit == "samples_per_s" and single.get(figure):
                limit = ranks * median(single[figure])
                result[name][f"{model} percent"] = [100 * speed / limit for speed in speeds]
    return result


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


def report(
    whats: Sequence[str],
    ways: Mapping[str, Way],
    unavailable: Mapping[str, str],
    entries: Sequence[Mapping[str, Any]],
    sizes: Sizes,
    places: Mapping[str, str],
) -> str:
    """Return all tables, with notes about missing candidates.

    ``places`` describes ``host``, ``cluster`` or both; ``unavailable`` contains reasons.
    """
    labels = {name: way.label for name, way in ways.items()}
    for entry in entries:
        if versions := entry.get("versions"):
            names = ", ".join(f"{name} {text}" for name, text in versions.items())
            labels[entry["way"]] = f"{ways[entry['way']].label} ({names})"
    parts = []
    for what in whats:
        for where, place in places.items():
            values = collect(entries, "training" if what == "memory" else what, where)
            if not values or (where == "cluster" and what not in ON_CLUSTER):
                continue
            if what == "training":
                values = with_efficiency(values, ways, RANKS)
            columns = columns_of(what, sizes)
            # The cluster measures some of the figures.
            present = [c for c in columns if any(c.figure in row for row in values.values())]
            missing = [unavailable[name] for name in MEASURES[what] if name in unavailable]
            notes = [NOTES[what], *(f"Not measured: {reason}" for reason in missing)]
            lines = "\n".join(f"- {note}" for note in notes)
            shown = table(labels, values, present or columns[:1])
            parts.append(f"### {TITLES[what]}: {place}\n\n{shown}\n\n{lines}")
    return "\n\n".join(parts)
