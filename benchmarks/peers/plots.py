"""Pictures of what jobs found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from figures import save_figure

from peers.plan import Sizes
from peers.summary import MODELS, Values

__all__ = ["draw_allreduce", "draw_training"]


def draw_allreduce(
    path: Path, values: Values, labels: Mapping[str, str], sizes: Sizes, title: str
) -> None:
    """Time by size, a line for each way; medians, and from the least to the most."""
    pyplot = _pyplot()
    cases = {name: nbytes for name, (nbytes, count) in sizes.cases.items() if count == 1}
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for way, found in values.items():
        there = [name for name in cases if found.get(name)]
        middles = [median(found[name]) for name in there]
        errors = [
            [middle - min(found[name]) for middle, name in zip(middles, there)],
            [max(found[name]) - middle for middle, name in zip(middles, there)],
        ]
        places = [cases[name] for name in there]
        if places:
            axes.errorbar(places, middles, errors, fmt="o-", capsize=3, label=labels[way])
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="bytes of a rank", ylabel="seconds", title=title)
    axes.set_xticks(list(cases.values()), list(cases))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path)
    pyplot.close(figure)


def draw_training(
    path: Path, values: Values, labels: Mapping[str, str], sizes: Sizes, title: str
) -> None:
    """Samples a second, a bar for each way in a picture for each model."""
    pyplot = _pyplot()
    count = len(sizes.models)
    figure, places = pyplot.subplots(
        1, count, figsize=(4 + 3 * count, 4), layout="constrained", sharey=True, squeeze=False
    )
    figure.suptitle(title)
    names = list(values)
    for axes, (model, (batch, _)) in zip(places[0], sizes.models.items()):
        speeds = [values[name].get(f"{model} samples_per_s", []) for name in names]
        middles = [median(speed) if speed else 0.0 for speed in speeds]
        bars = axes.barh([labels[name] for name in names], middles)
        axes.bar_label(bars, [f"{middle:.0f}" if middle else "" for middle in middles], padding=3)
        axes.set(title=MODELS[model].format(batch=batch), xlabel="samples a second")
        axes.margins(x=0.2)
    places[0][0].invert_yaxis()
    save_figure(figure, path)
    pyplot.close(figure)


def _pyplot() -> Any:
    """Without a screen; imported late, as it is not needed for anything else."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
