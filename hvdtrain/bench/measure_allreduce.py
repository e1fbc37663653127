"""``hvdtrain bench allreduce`` on one rank: arrays of growing size, then gradients in a graph.

Where the devices reduce (``--backend nccl``), tensors of the same sizes there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.measure_gradients import measure_gradients
from hvdtrain.bench.options import AllreduceOptions
from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.bench.timing import algorithm_bandwidth, bus_bandwidth, time_in_turn
from hvdtrain.collectives import Collectives

if TYPE_CHECKING:
    from hvdtrain.tensorflow.device_collectives import DeviceCollectives

__all__ = ["array_sizes", "measure"]

SMALLEST_BYTES = 4
FACTOR = 4
# One measurement moves about so many bytes, so that small arrays are reduced many times in it.
BYTES_A_MEASUREMENT = 4 << 20
MOST_CALLS = 200


def measure(options: AllreduceOptions) -> None:
    """Measure on the ranks that are there; the chief prints and writes."""
    hvdtrain.init()
    collectives = world.collectives()
    report = BenchReport("allreduce", options, collectives.size, world.is_chief)
    sizes = array_sizes(options.max_bytes)
    rows = [_measure_array(collectives, nbytes, options.repetitions) for nbytes in sizes]
    report.print("\nallreduce of one float32 array, sum")
    _show_sizes(report, rows)
    report.add(sizes=rows)
    on_devices = world.device_collectives()
    if on_devices is not None:
        there = [
            _measure_tensor(collectives, on_devices, nbytes, options.repetitions)
            for nbytes in sizes
        ]
        report.print(
            f"\nallreduce of one float32 tensor on {on_devices.device}, in a tf.function, sum"
        )
        _show_sizes(report, there)
        report.add(tensors=there)
    measure_gradients(report, collectives, options.repetitions, options.max_bytes)
    report.finish(options.json)


def array_sizes(max_bytes: int) -> list[int]:
    """4 bytes and its multiples by powers of 4, up to ``max_bytes``."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * FACTOR <= max_bytes:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


def _measure_array(collectives: Collectives, nbytes: int, repetitions: int) -> dict[str, Any]:
    array = np.ones(nbytes // 4, np.float32)
    copy = np.empty_like(array)
    return _compare(
        collectives,
        collectives.kind,
        nbytes,
        lambda: np.copyto(copy, array),
        lambda: collectives.allreduce(array, "sum", name="hvdtrain bench"),
        repetitions,
    )


def _measure_tensor(
    collectives: Collectives, on_devices: DeviceCollectives, nbytes: int, repetitions: int
) -> dict[str, Any]:
    import tensorflow as tf

    with tf.device(on_devices.device):
        tensor = tf.ones([nbytes // 4])

    @tf.function
    def reduce() -> tf.Tensor:
        (total,) = on_devices.allreduce([tensor], "sum", name=f"hvdtrain bench, {nbytes} bytes")
        return total[0]

    @tf.function
    def copy() -> tf.Tensor:
        with tf.device(on_devices.device):
            return tf.raw_ops.DeepCopy(x=tensor)[0]

    # Their first elements are on the host only when all is done.
    return _compare(
        collectives,
        on_devices.hint,
        nbytes,
        lambda: copy().numpy(),
        lambda: reduce().numpy(),
        repetitions,
    )


def _compare(
    collectives: Collectives,
    engine: str,
    nbytes: int,
    copy: Callable[[], Any],
    allreduce: Callable[[], Any],
    repetitions: int,
) -> dict[str, Any]:
    found = time_in_turn(
        collectives,
        {"copy": copy, "allreduce": allreduce},
        repetitions=repetitions,
        calls=max(1, min(MOST_CALLS, BYTES_A_MEASUREMENT // nbytes)),
    )
    best_s = found["allreduce"].best_s
    return {
        "bytes": nbytes,
        "engine": engine,
        "best_s": best_s,
        "median_s": found["allreduce"].median_s,
        "algorithm_bandwidth": algorithm_bandwidth(nbytes, best_s),
        "bus_bandwidth": bus_bandwidth(nbytes, best_s, collectives.size),
        "copy_best_s": found["copy"].best_s,
        "copy_median_s": found["copy"].median_s,
        "copy_bandwidth": algorithm_bandwidth(nbytes, found["copy"].best_s),
    }


def _show_sizes(report: BenchReport, rows: list[dict[str, Any]]) -> None:
    head = ["engine", "bytes", "best", "median", "algbw", "busbw", "copy best", "copy bw", "ratio"]
    cells = [
        [
            row["engine"],
            str(row["bytes"]),
            format_seconds(row["best_s"]),
            format_seconds(row["median_s"]),
            f"{row['algorithm_bandwidth'] / 1e9:.2f}",
            f"{row['bus_bandwidth'] / 1e9:.2f}",
            format_seconds(row["copy_best_s"]),
            f"{row['copy_bandwidth'] / 1e9:.2f}",
            f"{row['best_s'] / row['copy_best_s']:.2f}",
        ]
        for row in rows
    ]
    report.print_table(head, cells)
    report.print(
        "algbw: bytes / time; busbw: algbw * 2 (n - 1) / n, both in GB/s from the best time."
        "\ncopy: every rank copies as many bytes once in its memory at the same time; ratio: best"
        "\ntime over best copy."
    )
