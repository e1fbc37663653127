"""What smaller gradients between hosts do to a training: examples/mnist.py on two hosts.

    python benchmarks/compressed_digits.py
    python benchmarks/compressed_digits.py --rate 20mbit --epochs 8

Hosts are those of the tests, on this machine: it needs root, and the packages of
tests/testbed/packages.txt. Links are shaped by tbf in both directions.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import median

from cluster_jobs import REPOSITORY, shaped_cluster

FORMS = ("none", "fp16", "bf16", "int8", "powersgd:4")
JOB_TIMEOUT_S = 900.0


def main() -> None:
    """Train with each form, and print accuracy and speed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit", help="of each link; default %(default)s")
    parser.add_argument("--queue-ms", type=int, default=20, help="before it; default %(default)s")
    parser.add_argument("--epochs", type=int, default=8, help="default %(default)s")
    parser.add_argument("--forms", nargs="+", default=FORMS, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()
    print(f"2 hosts, 1 rank each, links of {asked.rate}, {asked.epochs} epochs\n")
    print("| --compression | test accuracy | samples a second |")
    print("|---|---|---|")
    found = {}
    for form in asked.forms:
        accuracy, speed = found[form] = train(asked, form)
        print(f"| {form} | {accuracy:.2%} | {speed:.0f} |", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


def train(asked: argparse.Namespace, form: str) -> tuple[float, float]:
    """The accuracy on the test set, and the samples a second that most steps took."""
    with shaped_cluster(2, asked.rate, asked.queue_ms) as (cluster, environ):
        done = cluster.run(
            [
                *(sys.executable, "-m", "hvdtrain", "run", "-H", "node1:1,node2:1"),
                *("--compression", form, "--chief-only", "--"),
                *(sys.executable, REPOSITORY / "examples/mnist.py", "--epochs", str(asked.epochs)),
            ],
            env=environ,
            timeout_s=JOB_TIMEOUT_S,
        )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nthe job ended with {done.returncode}")
    [accuracy] = re.findall(r"^test accuracy = ([\d.]+)$", done.stdout, re.MULTILINE)
    speeds = re.findall(r"\(([\d.]+) examples/sec", done.stdout)
    return float(accuracy), median(map(float, speeds))


if __name__ == "__main__":
    main()
