"""Medians and spreads of what jobs found, as tables in Markdown."""

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
# Values of all repetitions, by way and figure.
Values = dict[str, dict[str, list[float]]]

TITLES = {
    "allreduce": "Allreduce of float32, by size",
    "training": "Training, samples a second by the clock around `fit` or the loop",
    "startup": "From the command to the end of the first step",
    "memory": "Memory of rank 0 at its peak, LeNet",
    "recovery": "From the kill of a rank to the end of the next step, LeNet",
}
NOTES = {
    "allreduce": "hvdtrain, MPI and torch add up arrays in their memory; MPI gets a call for each "
    "array; Horovod, hvdtrain.tensorflow and the ring add up tensors of TensorFlow.",
    "training": "Efficiency is that over the same number of single processes of the same "
    "framework, each with one thread. Keras trains by `fit`, with its metrics; Horovod in a loop "
    "over a tf.function; torch in a loop over the same layers written in torch. On four hosts "
    "TensorFlow has two threads for operations beside each other, and one elsewhere.",
    "startup": "A model that computes next to nothing; imports, tracing and all else included.",
    "memory": "The largest resident set (VmHWM), memory that ranks share included.",
    "recovery": "With a restart all ranks begin anew, without a checkpoint here.",
}
MODELS = {
    "lenet": "LeNet, batch 64",
    "mlp": "MLP of 80 MB, batch 64",
    "resnet50": "ResNet-50, 64x64, batch {batch}",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """Of a table: the figure's name in what was found, what stands above it, how it is written."""

    figure: str
    head: str
    show: Show


def collect(entries: Sequence[Mapping[str, Any]], what: str, where: str) -> Values:
    """The values of one measure, in the order of the repetitions."""
    values: Values = {}
    for entry in entries:
        if (entry["what"], entry["where"]) == (what, where):
            of_way = values.setdefault(entry["way"], {})
            for figure, value in entry.get("found", {}).items():
                of_way.setdefault(figure, []).append(value)
    return values


def show_values(values: Sequence[float], show: Show) -> str:
    """The median, and from the least to the most where they differ."""
    if not values:
        return ""
    middle, least, most = (show(value) for value in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def table(labels: Mapping[str, str], values: Values, columns: Sequence[Column]) -> str:
    """A row for each way that ran; one whose jobs all failed says so."""
    rows = ["| way | " + " | ".join(column.head for column in columns) + " |"]
    rows.append("|---" * (len(columns) + 1) + "|")
    for way, found in values.items():
        cells = [show_values(found.get(column.figure, []), column.show) for column in columns]
        if not found:
            cells[0] = "failed"
        rows.append(f"| {labels[way]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def with_efficiency(values: Values, ways: Mapping[str, Way], ranks: int) -> Values:
    """The same with the efficiency of each model in percent, of ways that are compared with one.

    Of each repetition, held against the median of the single processes.
    """
    result = {name: dict(found) for name, found in values.items()}
    for name, found in values.items():
        single = values.get(ways[name].alone, {})
        for figure, speeds in found.items():
            model, _, unit = figure.partition(" ")
            if unit == "samples_per_s" and single.get(figure):
                most = ranks * median(single[figure])
                result[name][f"{model} percent"] = [100 * speed / most for speed in speeds]
    return result


def report(
    whats: Sequence[str],
    wheres: Sequence[str],
    ways: Mapping[str, Way],
    not_there: Mapping[str, str],
    entries: Sequence[Mapping[str, Any]],
    sizes: Sizes,
    ranks: int,
    links: str,
) -> str:
    """All tables, each with what is not in it and why.

    Args:
        whats: Measures.
        wheres: Of ``host`` and ``cluster``.
        ways: Those that ran.
        not_there: Why others did not.
        entries: What all jobs found.
        sizes: How much they measured.
        ranks: On this host.
        links: Of the cluster, in words.
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
            # On the cluster there is not all of it.
            there = [one for one in columns if any(one.figure in row for row in values.values())]
            shown = table(labels, values, there or columns[:1])
            missing = [not_there[name] for name in MEASURES[what] if name in not_there]
            missing += NOT_MEASURED.get(what, ())
            notes = [NOTES[what], *(f"Not measured: {reason}" for reason in missing)]
            lines = "\n".join(f"- {note}" for note in notes)
            parts.append(f"### {TITLES[what]}: {place}\n\n{shown}\n\n{lines}")
    return "\n\n".join(parts)


def columns_of(what: str, sizes: Sizes) -> list[Column]:
    """What stands in the table of a measure."""
    if what == "allreduce":
        return [Column(figure=name, head=name, show=format_seconds) for name in sizes.cases]
    if what == "startup":
        return [Column(figure="first_step_s", head="seconds", show="{:.1f}".format)]
    if what == "recovery":
        return [Column(figure="kill_to_next_step_s", head="seconds", show="{:.2f}".format)]
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
    """A way's label, with the versions that its ranks told."""
    for entry in entries:
        if entry["way"] == way.name and entry.get("versions"):
            names = ", ".join(f"{name} {text}" for name, text in entry["versions"].items())
            return f"{way.label} ({names})"
    return way.label
