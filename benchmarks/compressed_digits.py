"""Train examples/mnist.py on two hosts with compressed gradients.

    python benchmarks/compressed_digits.py --epochs 4
    python benchmarks/compressed_digits.py --rate 1gbit --epochs 8 --forms none powersgd:4

The program uses the test cluster on this machine, which needs root and the packages of
tests/testbed/packages.txt. tbf shapes the links in both directions.
"""

from __future__ import annotations

import argparse
import re
import sys
from statistics import median

from cluster_jobs import JOB_TIMEOUT_S, REPOSITORY, shaped_cluster

FORMS = ("none", "fp16", "bf16", "int8", "powersgd:4")


def main() -> None:
    """Train with each compression, and print accuracy and speed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit", help="speed of each link; default %(default)s")
    parser.add_argument("--epochs", type=int, default=8, help="default %(default)s")
    parser.add_argument("--forms", nargs="+", default=FORMS, help="default: all")
    arguments = parser.parse_args()
    print("| --compression | test accuracy | samples per second |\n|---|---|---|")
    for form in arguments.forms:
        with shaped_cluster(2, arguments.rate) as (cluster, environ):
            argv = [sys.executable, "-m", "hvdtrain", "run", "-H", "node1:1,node2:1"]
            argv += ["--compression", form, "--chief-only", "--", sys.executable]
            argv += [str(REPOSITORY / "examples/mnist.py"), "--epochs", str(arguments.epochs)]
            done = cluster.run(argv, env=environ, timeout_s=JOB_TIMEOUT_S)
        if done.returncode:
            raise SystemExit(
                f"{done.stdout}{done.stderr}\nthe job failed with exit code {done.returncode}"
            )
        [accuracy] = re.findall(r"^test accuracy = ([\d.]+)$", done.stdout, re.MULTILINE)
        speeds = re.findall(r"\(([\d.]+) examples/sec", done.stdout)
        speed = median(map(float, speeds))
        print(f"| {form} | {float(accuracy):.2%} | {speed:.0f} |", flush=True)


if __name__ == "__main__":
    main()
