"""One rank's part of scaling.py: seconds of allreduces, and of steps that hide them.

    mpirun ... python scaling_steps.py '{"bytes": 16777216, "segment_bytes": 8192, "runs": 5, ...}'

Sleeping stands for computing, so that a rank has a speed of its own where ranks share cores. The
chief prints what it found as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import create, link_speed
from hvdtrain.config import read_settings

ARRAYS = 40
COMPUTE_TIMEOUT_S = 60.0


def main() -> None:
    """Measure, and print."""
    job = json.loads(sys.argv[1])
    if job["segment_bytes"] is not None:
        link_speed.LEAST_SEGMENT_BYTES = link_speed.MOST_SEGMENT_BYTES = job["segment_bytes"]
    engine: Any = create(read_topology(os.environ), read_settings(os.environ))
    arrays = [np.ones(job["bytes"] // 4 // ARRAYS, np.float32) for _ in range(ARRAYS)]
    small = np.ones(job["small_bytes"] // 4, np.float32)
    found = {
        "allreduce_s": [time_allreduce(engine, arrays) for _ in range(job["runs"] + 1)][1:],
        "small_s": [time_allreduce(engine, [small]) for _ in range(10 * job["runs"] + 1)][1:],
        "step_s": [
            time_step(engine, arrays, job["compute_s"], job["backward"])
            for _ in range(job["runs"] + 1)
        ][1:],
    }
    engine.transport.leave()
    if engine.rank == 0:
        print(json.dumps(found), flush=True)


def time_allreduce(engine: Any, arrays: list[np.ndarray]) -> float:
    """Seconds on the slowest rank."""
    engine.barrier(name="begin")
    begun_s = time.perf_counter()
    engine.grouped_allreduce(arrays, name="arrays")
    return slowest(engine, time.perf_counter() - begun_s)


def time_step(engine: Any, arrays: list[np.ndarray], compute_s: float, backward: float) -> float:
    """Seconds of a step on the slowest rank; gradients come bit by bit in its last part."""
    engine.barrier(name="begin")
    buckets = divide(arrays, engine.bucket_bytes)
    come = [threading.Event() for _ in buckets]

    def compute() -> None:
        time.sleep(compute_s * (1 - backward))
        for event in come:
            time.sleep(compute_s * backward / len(come))
            event.set()

    begun_s = time.perf_counter()
    computing = threading.Thread(target=compute)
    computing.start()
    for event, bucket in zip(come, buckets):
        if not event.wait(COMPUTE_TIMEOUT_S):
            raise SystemExit(f"no gradients came within {COMPUTE_TIMEOUT_S:g} s")
        engine.grouped_allreduce(bucket, name="bucket")
    computing.join(COMPUTE_TIMEOUT_S)
    return slowest(engine, time.perf_counter() - begun_s)


def divide(arrays: list[np.ndarray], bucket_bytes: int) -> list[list[np.ndarray]]:
    """Arrays in buckets, each complete when it holds so many bytes; 0 for one of all."""
    buckets: list[list[np.ndarray]] = [[]]
    for array in arrays:
        if bucket_bytes and sum(each.nbytes for each in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(array)
    return buckets


def slowest(engine: Any, seconds: float) -> float:
    """The largest of all ranks' values."""
    return float(engine.allreduce(np.array(seconds), "max", name="seconds"))


if __name__ == "__main__":
    main()
