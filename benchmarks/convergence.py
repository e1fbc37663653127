"""How well and how fast each mode learns handwritten digits from the same number of samples.

python benchmarks/convergence.py
python benchmarks/convergence.py --modes allreduce local-sgd diloco
python benchmarks/convergence.py --plot convergence.svg --json convergence.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from figures import place_of_figures, save_figure
from modes import LOCAL_MODES, MODES, WORKERS, train

ALL = {**MODES, **LOCAL_MODES}
LEAST_ACCURACY = 97.0
MOST_BEHIND_POINTS = 1.0


def main() -> None:
    """Run all modes, print a table, and draw loss over time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=15, help="default %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="default %(default)s")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=0.005,
        help="for one gradient in an update; default %(default)s",
    )
    parser.add_argument("--modes", nargs="+", choices=ALL, default=[*ALL], help="default: all")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument(
        "--plot", type=place_of_figures, help="draw loss over time (SVG, PNG or PDF)"
    )
    asked = parser.parse_args()
    arguments = ["--epochs", asked.epochs, "--batch-size", asked.batch_size]
    arguments += ["--learning-rate", asked.learning_rate]

    print(
        f"{WORKERS} workers, {asked.epochs} epochs, batch {asked.batch_size}, SGD with momentum\n\n"
        "mode                        test accuracy   last loss   seconds   reduced by a rank"
    )
    found = {}
    for name in asked.modes:
        mode = ALL[name]
        (chief,) = train(mode, "digits.py", [str(word) for word in arguments])
        found[name] = chief
        seconds, loss = chief["points"][-1]
        # What servers and workers send each other is no reduction.
        reduced = "" if mode.ranks > WORKERS else f"{chief['bytes'] / 1e6:.1f} MB"
        print(
            f"{mode.label:<26}  {100 * chief['accuracy']:12.2f} %  {loss:10.3f}  {seconds:8.1f}"
            f"  {reduced:>17}",
            flush=True,
        )
    for name in ("async-ps", *LOCAL_MODES):
        if {"allreduce", name} <= found.keys():
            print(f"\n{ALL[name].label}: {_compare(found[name], found['allreduce'])}", end="")
            fewer = found["allreduce"]["bytes"] / found[name]["bytes"]
            print(f", {fewer:.1f} times fewer bytes reduced" if name in LOCAL_MODES else "")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    if asked.plot:
        _draw({ALL[name].label: chief["points"] for name, chief in found.items()}, asked.plot)


def _compare(chief: dict[str, Any], synchronous: dict[str, Any]) -> str:
    """What a mode has come to beside allreduce, and what is asked of it."""
    accuracy = 100 * chief["accuracy"]
    behind = 100 * synchronous["accuracy"] - accuracy
    return (
        f"{accuracy:.2f} % (at least {LEAST_ACCURACY:g} %), {behind:+.2f} points behind allreduce "
        f"(at most {MOST_BEHIND_POINTS:g})"
    )


def _draw(courses: dict[str, list[tuple[float, float]]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for label, points in courses.items():
        seconds, losses = zip(*points)
        axes.plot(seconds, losses, "o-", markersize=3, label=label)
    axes.set(xlabel="seconds", ylabel="validation loss", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    main()
