"""What one slow worker of three costs the other two, in each mode.

    python benchmarks/slow_worker.py
    python benchmarks/slow_worker.py --plot slow-worker.svg --json slow-worker.json

A mode is run twice: with three workers alike, and with one of them four times slower. A worker's
own speed is what it has in the first run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

from figures import place_of_figures, save_figure
from modes import MODES, WORKERS, Mode, train

SLOW_RANK = WORKERS - 1
# What is asked of the others' speed, in percent of their own.
ASKED = {"async-ps": 95.0, "backup": 90.0}


def main() -> None:
    """Run all modes, print a table, and draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=100.0, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="of each worker; default %(default)s")
    parser.add_argument("--times", type=float, default=4.0, help="slower; default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--plot", type=place_of_figures, help="draw them (SVG, PNG or PDF)")
    asked = parser.parse_args()
    pace = ["--step-ms", str(asked.step_ms), "--steps", str(asked.steps)]
    slow = ["--slow-rank", str(SLOW_RANK), "--times", str(asked.times)]

    print(
        f"{WORKERS} workers, steps of {asked.step_ms:g} ms; then one of them {asked.times:g} times "
        "slower\n\nmode                        own speed   with the slow one   of their own   asked"
    )
    rows = {}
    for name, mode in MODES.items():
        own, others = (_others_speed(mode, arguments) for arguments in (pace, [*pace, *slow]))
        percent = 100 * others / own
        rows[name] = {"own_steps_per_s": own, "steps_per_s": others, "percent": percent}
        limit = f"at least {ASKED[name]:g} %" if name in ASKED else ""
        print(
            f"{mode.label:<26}  {own:7.2f}/s  {others:16.2f}/s  {percent:12.1f} %   {limit}",
            flush=True,
        )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=2) + "\n")
    if asked.plot:
        _draw({MODES[name].label: row["percent"] for name, row in rows.items()}, asked)


def _others_speed(mode: Mode, arguments: list[str]) -> float:
    found = train(mode, "paced_training.py", arguments)
    return mean(entry["steps_per_s"] for entry in found if entry["rank"] != SLOW_RANK)


def _draw(percents: dict[str, float], asked: argparse.Namespace) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
    bars = axes.barh(list(percents), list(percents.values()))
    axes.bar_label(bars, fmt="%.0f %%", padding=3)
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 115),
        xlabel="speed of the other two, in percent of their own",
        title=f"one of {WORKERS} workers is {asked.times:g} times slower",
    )
    save_figure(figure, asked.plot)


if __name__ == "__main__":
    main()
