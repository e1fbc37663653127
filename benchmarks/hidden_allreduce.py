"""How much of an allreduce between hosts is hidden behind the backward pass.

    python benchmarks/hidden_allreduce.py
    python benchmarks/hidden_allreduce.py --rate 1gbit --width 2048 --batch 512
    python benchmarks/hidden_allreduce.py --model lenet --batch 256 --one-core

Hosts are those of the tests, as in between_hosts.py. A model is trained with ``fit``, its gradients
combined all together and in buckets, in turn; beside it the ranks compute without combining
anything, and combine gradients without computing. A step can't take less than the longer of the
two. Nor than the bound, as gradients come one after the other, none before the forward pass is
done: there a bucket waits for all ranks and then for as long as its bytes take, and is not sent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from cluster_jobs import HVDTRAIN, shaped_hosts

WORKER = Path(__file__).with_name("hidden_calls.py")


def main() -> None:
    """Run, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3, 4), help="default 2")
    parser.add_argument("--rate", default="200mbit", help="of each link; default %(default)s")
    parser.add_argument("--queue-ms", type=int, default=20, help="before it; default %(default)s")
    parser.add_argument(
        "--model", choices=("mlp", "lenet"), default="mlp", help="default %(default)s"
    )
    parser.add_argument("--width", type=int, default=1024, help="of mlp's; default %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="of mlp; default %(default)s")
    parser.add_argument("--batch", type=int, default=512, help="of a rank; default %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="of a run; default %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="of each way; default %(default)s")
    parser.add_argument(
        "--bucket-bytes", type=int, default=0, help="in place of what is found at the start"
    )
    parser.add_argument("--one-core", action="store_true", help="bind each rank to a core")
    parser.add_argument(
        "--inter-op-threads", type=int, default=0, help="of TensorFlow; default: as found"
    )
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()
    names = (
        *("model", "width", "layers", "batch", "steps", "runs"),
        *("bucket_bytes", "one_core", "inter_op_threads"),
    )
    job = {name: getattr(asked, name) for name in names}
    with shaped_hosts(asked.hosts, 1, asked.rate, asked.queue_ms) as hosts:
        found = hosts.run(HVDTRAIN, [WORKER, json.dumps(job)])
    steps = found["step_s"]
    longer = max(median(steps["computes"]), median(steps["combines"]))
    print(
        f"{asked.hosts} hosts, links of {asked.rate}, {found['bytes'] / 1e6:.1f} MB of gradients, "
        f"buckets of {found['bucket_bytes'] / 1e6:.2f} MB\n"
    )
    print("| a step | median of runs | shortest to longest | over the longer |\n|---|---|---|---|")
    for way, times in steps.items():
        spread = f"{min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} ms"
        middle = median(times)
        print(f"| {way} | {middle * 1e3:.0f} ms | {spread} | {middle / longer:.2f} |")
    if asked.json:
        asked.json.write_text(json.dumps({**vars(asked), **found}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
