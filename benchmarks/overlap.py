"""What it brings that a worker computes while its last gradient is under way.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --step-ms 5 --json overlap.json

Two workers train LeNet with small batches, so that the exchange with the server takes long beside
computing. Each run without overlap is followed by one with it. With ``--step-ms`` a worker also
sleeps in each step, as if a device of its own computed: then cores are free for the exchange.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median

from modes import MODES, Mode, train

WORKERS = 2
KINDS = {"waits": "waiting", "overlaps": "async-ps"}


def main() -> None:
    """Run all, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs="+",
        default=[0.0, 10.0, 30.0],
        help="to sleep in a step; default 0 10 30",
    )
    parser.add_argument("--steps", type=int, default=300, help="default %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="of each kind; default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()

    print(
        f"{WORKERS} workers, {asked.runs} runs of each kind in turn; steps/s of a worker, median\n"
    )
    print("sleeps    waits   overlaps   ratio   of single runs")
    rows = []
    for step_ms in asked.step_ms:
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(asked.runs):
            for kind, mode in KINDS.items():
                found[kind].append(_speed(MODES[mode], step_ms, asked.steps))
        waits, overlaps = median(found["waits"]), median(found["overlaps"])
        ratios = [after / before for before, after in zip(*found.values())]
        rows.append({"step_ms": step_ms, **found, "ratio": overlaps / waits})
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{step_ms:4g} ms  {waits:7.1f}  {overlaps:9.1f}  {overlaps / waits:6.2f}   {spread}",
            flush=True,
        )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=2) + "\n")


def _speed(mode: Mode, step_ms: float, steps: int) -> float:
    mode = Mode(mode.label, WORKERS + 1, mode.flags)
    arguments = ["--lenet", "--step-ms", str(step_ms), "--steps", str(steps)]
    return mean(entry["steps_per_s"] for entry in train(mode, "paced_training.py", arguments))


if __name__ == "__main__":
    main()
