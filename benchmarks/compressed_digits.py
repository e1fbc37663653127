"""Train examples/mnist.py on two hosts with compressed gradients.

    python benchmarks/compressed_digits.py --epochs 4
    python benchmarks/compressed_digits.py --rate 1gbit --epochs 8 --forms none powersgd:4

The program uses the test cluster on this machine, which needs root and the packages of
tests/testbed/packages.txt. tbf shapes the links in both directions.
"""

from __future__ import annotations

import re
import sys
from statistics import median

from common import REPOSITORY, make_parser, print_head, print_row, shaped_cluster

FORMS = ("none", "fp16", "bf16", "int8", "powersgd:4")
JOB_TIMEOUT_S = 900.0


def main() -> None:
    """Train with each compression, and print accuracy and speed."""
    parser = make_parser(__doc__)
    parser.add_argument("--rate", default="100mbit", help="speed of each link; default %(default)s")
    parser.add_argument("--epochs", type=int, default=8, help="default %(default)s")
    parser.add_argument("--forms", nargs="+", default=FORMS, help="default: all")
    arguments = parser.parse_args()
    print_head("--compression", "test accuracy", "samples per second")
    for form in arguments.forms:
        with shaped_cluster(2, arguments.rate) as (cluster, environ):
            argv = [sys.executable, "-m", "hvdtrain", "run", "-H", "node1:1,node2:1"]
            argv += ["--compression", form, "--chief-only", "--", sys.executable]
            argv += [str(REPOSITORY / "examples/mnist.py"), "--epochs", str(arguments.epochs)]
            done = cluster.run(argv, env=environ, timeout_s=JOB_TIMEOUT_S)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\nthe job failed")
        [accuracy] = re.findall(r"^test accuracy = ([\d.]+)$", done.stdout, re.MULTILINE)
        speeds = re.findall(r"\(([\d.]+) examples/sec", done.stdout)
        print_row(form, f"{float(accuracy):.2%}", f"{median(map(float, speeds)):.0f}")


if __name__ == "__main__":
    main()
