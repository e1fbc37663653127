"""The model of ``hvdtrain bench predict`` compared with runs on up to 16 hosts.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rate 50mbit --hosts 2 4 8 16 --bytes 4194304

The program uses the test cluster on this machine, which needs root and the packages of
tests/testbed/packages.txt. It measures the costs of calls, messages and bytes on two hosts with
fast links; nothing is fitted to the predicted runs. In these, each rank has its own host with links
shaped by tbf, all hosts share the cores of this machine, and ranks sleep instead of computing.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from statistics import median
from typing import Any

import numpy as np
from cluster_jobs import HVDTRAIN, run_on_hosts, shaped_cluster

from hvdtrain.bench.cost_model import Cluster, Costs, Step, predict_allreduce, predict_step
from hvdtrain.bench.options import bytes_per_s
from hvdtrain.cluster.placement import available_cores
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import create, tuning
from hvdtrain.config import read_settings

FAST = "20gbit"
# TCP's payload as a share of the frames that tbf counts.
PAYLOAD = 1448 / 1514
SMALL_BYTES = 4096
SEGMENTS = (8 << 10, 256 << 10)
RUNS = 5
ARRAYS = 40
COMPUTE_S = 1.0
COMPUTE_TIMEOUT_S = 60.0
BACKWARD = 2 / 3


def main() -> None:
    """Measure costs, predict, run, and print the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rate", default="100mbit", help="speed of each link; default %(default)s")
    parser.add_argument(
        "--bytes", type=int, default=8 << 20, help="bytes of gradients; default 8 MiB"
    )
    parser.add_argument("--rank", type=int, metavar="SEGMENT_BYTES", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure_rank(arguments.bytes, arguments.rank)
        return
    nbytes = arguments.bytes
    costs = measure_costs(nbytes)
    print(
        f"a call {costs.call_s * 1e6:.0f} us, a message {costs.message_s * 1e6:.0f} us, "
        f"a core {costs.core_bytes_per_s / 1e6:.0f} MB/s"
    )
    step = Step(compute_s=COMPUTE_S, gradient_bytes=nbytes, backward=BACKWARD)
    print("| hosts | allreduce predicted | measured | error | step predicted | measured | error |")
    print("|---|---|---|---|---|---|---|")
    for hosts in arguments.hosts:
        cluster = Cluster(
            hosts=hosts,
            ranks_per_host=1,
            link=tuning.Link(100e-6, bytes_per_s(arguments.rate) * PAYLOAD),
            ranks_per_core=max(1.0, hosts / available_cores()),
        )
        times = run(nbytes, hosts, arguments.rate)
        pairs = (
            (predict_allreduce(costs, cluster, nbytes).seconds, median(times["allreduce_s"])),
            (predict_step(costs, cluster, step).seconds, median(times["step_s"])),
        )
        cells = [f"{p * 1e3:.0f} ms | {m * 1e3:.0f} ms | {p / m - 1:+.0%}" for p, m in pairs]
        print(f"| {hosts} | {' | '.join(cells)} |", flush=True)


def measure_costs(nbytes: int) -> Costs:
    """Measure the costs of calls, messages and bytes on two hosts with fast links.

    The same array in smaller segments differs only in the number of messages.
    """
    small, large = (run(nbytes, 2, FAST, segment_bytes) for segment_bytes in SEGMENTS)
    call_s = median(large["small_s"])
    many_s, few_s = median(small["allreduce_s"]), median(large["allreduce_s"])
    # Half of the array is sent to the other host, and the sum of the other half.
    many, few = (nbytes / segment_bytes for segment_bytes in SEGMENTS)
    message_s = (many_s - few_s) / (many - few)
    rest_s = few_s - call_s - few * message_s
    return Costs(call_s=call_s, message_s=message_s, core_bytes_per_s=nbytes / rest_s)


def run(nbytes: int, hosts: int, rate: str, segment_bytes: int = 0) -> dict[str, Any]:
    """Run this program on hosts; 0 leaves the size of segments to hvdtrain."""
    program = [__file__, "--bytes", nbytes, "--rank", segment_bytes]
    with shaped_cluster(hosts, rate) as (cluster, environ):
        times: dict[str, Any] = run_on_hosts(cluster, environ, HVDTRAIN, program)
        return times


def measure_rank(nbytes: int, segment_bytes: int) -> None:
    """Measure on one rank; the chief prints the slowest rank's seconds as JSON."""
    if segment_bytes:
        tuning.LEAST_SEGMENT_BYTES = tuning.MOST_SEGMENT_BYTES = segment_bytes
    engine: Any = create(read_topology(os.environ), read_settings(os.environ))
    arrays = [np.ones(nbytes // 4 // ARRAYS, np.float32) for _ in range(ARRAYS)]
    small = [np.ones(SMALL_BYTES // 4, np.float32)]
    times = {
        "allreduce_s": [time_allreduce(engine, arrays) for _ in range(RUNS + 1)][1:],
        "small_s": [time_allreduce(engine, small) for _ in range(10 * RUNS + 1)][1:],
        "step_s": [time_step(engine, arrays) for _ in range(RUNS + 1)][1:],
    }
    engine.transport.leave()
    if engine.rank == 0:
        print(json.dumps(times), flush=True)


def time_allreduce(engine: Any, arrays: list[np.ndarray]) -> float:
    """Return the seconds of an allreduce on the slowest rank."""
    engine.barrier(name="begin")
    start_s = time.perf_counter()
    engine.grouped_allreduce(arrays, name="arrays")
    return slowest(engine, time.perf_counter() - start_s)


def time_step(engine: Any, arrays: list[np.ndarray]) -> float:
    """Return the seconds of a step, whose last part yields gradients, on the slowest rank."""
    engine.barrier(name="begin")
    buckets = divide(arrays, engine.bucket_bytes)
    ready = [threading.Event() for _ in buckets]

    def compute() -> None:
        time.sleep(COMPUTE_S * (1 - BACKWARD))
        for event in ready:
            time.sleep(COMPUTE_S * BACKWARD / len(ready))
            event.set()

    start_s = time.perf_counter()
    computing = threading.Thread(target=compute)
    computing.start()
    for event, bucket in zip(ready, buckets):
        if not event.wait(COMPUTE_TIMEOUT_S):
            raise SystemExit(f"the computation took longer than {COMPUTE_TIMEOUT_S:g} s")
        engine.grouped_allreduce(bucket, name="bucket")
    computing.join(COMPUTE_TIMEOUT_S)
    return slowest(engine, time.perf_counter() - start_s)


def divide(arrays: list[np.ndarray], bucket_bytes: int) -> list[list[np.ndarray]]:
    """Divide arrays into buckets of ``bucket_bytes``, or into one bucket if it is 0."""
    buckets: list[list[np.ndarray]] = [[]]
    for array in arrays:
        if bucket_bytes and sum(each.nbytes for each in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(array)
    return buckets


def slowest(engine: Any, seconds: float) -> float:
    """Return the largest of all ranks' values."""
    return float(engine.allreduce(np.array(seconds), "max", name="seconds"))


if __name__ == "__main__":
    main()
