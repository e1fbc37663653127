"""Predictions of ``hvdtrain bench predict``'s model held against runs on up to 16 hosts.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rate 50mbit --hosts 2 4 8 16 --bytes 4194304

Hosts are those of the tests, on this machine: it needs root, and the packages of
tests/testbed/packages.txt. What calls, messages and bytes cost is measured on two hosts whose links
are not slowed down; nothing is fitted to the runs that are predicted. There each rank has a host of
its own with links shaped by tbf, and all share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from cluster_jobs import HVDTRAIN, shaped_hosts

from hvdtrain.bench.cost_model import Cluster, Costs, Step, predict_allreduce, predict_step
from hvdtrain.bench.options import bytes_per_s
from hvdtrain.cluster.cores import available_cores
from hvdtrain.collectives.link_speed import Link

WORKER = Path(__file__).with_name("scaling_steps.py")
FAST = "20gbit"
# Of what tbf lets through TCP's payload takes this share, with frames of 1500 bytes.
PAYLOAD = 1448 / 1514
SMALL_BYTES = 4096
SEGMENTS = (8 << 10, 256 << 10)


def main() -> None:
    """Measure costs, predict, run, and print how far apart both are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rate", default="100mbit", help="of each link; default %(default)s")
    parser.add_argument("--queue-ms", type=int, default=20, help="before it; default %(default)s")
    parser.add_argument("--bytes", type=int, default=8 << 20, help="of gradients; default 8 MiB")
    parser.add_argument("--compute-ms", type=float, default=1000.0, help="default %(default)s")
    parser.add_argument("--backward", type=float, default=2 / 3, help="share of it; default 2/3")
    parser.add_argument("--runs", type=int, default=5, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()

    costs = measure_costs(asked)
    print(
        f"a call {costs.call_s * 1e6:.0f} us, a message {costs.message_s * 1e6:.0f} us, "
        f"a core {costs.core_bytes_per_s / 1e6:.0f} MB/s"
    )
    step = Step(
        compute_s=asked.compute_ms / 1e3, gradient_bytes=asked.bytes, backward=asked.backward
    )
    print(f"links of {asked.rate}, {asked.bytes} bytes, {asked.compute_ms:g} ms of computing\n")
    print("| hosts | allreduce predicted | measured | off | step predicted | measured | off |")
    print("|---|---|---|---|---|---|---|")
    figures = []
    for hosts in asked.hosts:
        cluster = Cluster(
            hosts=hosts,
            ranks_per_host=1,
            link=Link(100e-6, link_bytes_per_s(asked.rate)),
            ranks_per_core=max(1.0, hosts / available_cores()),
        )
        predicted = (
            predict_allreduce(costs, cluster, asked.bytes).seconds,
            predict_step(costs, cluster, step).seconds,
        )
        found = run(asked, hosts, asked.rate)
        measured = median(found["allreduce_s"]), median(found["step_s"])
        cells = [
            f"{p * 1e3:.0f} ms | {m * 1e3:.0f} ms | {p / m - 1:+.0%}"
            for p, m in zip(predicted, measured)
        ]
        print(f"| {hosts} | {' | '.join(cells)} |", flush=True)
        figures.append({"hosts": hosts, "predicted_s": predicted, "measured": found})
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure_costs(asked: argparse.Namespace) -> Costs:
    """What calls, messages and bytes cost where links are no limit, on two hosts.

    The same array in small segments takes more messages, and nothing else is different.
    """
    small, large = (run(asked, 2, FAST, segment_bytes) for segment_bytes in SEGMENTS)
    call_s = median(large["small_s"])
    many_s, few_s = median(small["allreduce_s"]), median(large["allreduce_s"])
    # Half of the array goes to the other host, to be added up, and the sum of the other half.
    many, few = (asked.bytes / segment_bytes for segment_bytes in SEGMENTS)
    message_s = (many_s - few_s) / (many - few)
    rest_s = few_s - call_s - few * message_s
    return Costs(call_s=call_s, message_s=message_s, core_bytes_per_s=asked.bytes / rest_s)


def run(
    asked: argparse.Namespace, hosts: int, rate: str, segment_bytes: int | None = None
) -> dict[str, Any]:
    """What the ranks of one job found, with segments as hvdtrain chooses them, if not told."""
    job = {
        "bytes": asked.bytes,
        "small_bytes": SMALL_BYTES,
        "segment_bytes": segment_bytes,
        "runs": asked.runs,
        "compute_s": asked.compute_ms / 1e3,
        "backward": asked.backward,
    }
    with shaped_hosts(hosts, 1, rate, asked.queue_ms) as built:
        found: dict[str, Any] = built.run(HVDTRAIN, [WORKER, json.dumps(job)])
        return found


def link_bytes_per_s(rate: str) -> float:
    """What TCP can move over a link of a rate as tc writes it."""
    return bytes_per_s(rate) * PAYLOAD


if __name__ == "__main__":
    main()
