"""``hvdtrain bench allreduce``: times an allreduce of arrays of growing size, then of gradients.

With ``--backend nccl``, it also times an allreduce of tensors on the devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.options import AllreduceOptions
from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.bench.timing import Timing, bus_bandwidth, time_in_turn
from hvdtrain.collectives.engine import Engine
from hvdtrain.gradients.reducer import GradientReducer

if TYPE_CHECKING:
    from hvdtrain.frameworks.tensorflow.device_collectives import DeviceCollectives

__all__ = ["array_sizes", "measure", "resnet50_shapes"]

SMALLEST_BYTES = 4
FACTOR = 4
# A measurement repeats the allreduce of a small array up to this total size.
BYTES_PER_MEASUREMENT = 4 << 20
MAX_CALLS = 200
MAX_TIMES_COPY = 3.0
MAX_SMALL_S = 200e-6
SMALL_CALLS = 20
# Number of consecutive reductions in one compiled function, so that its call hardly counts.
SMALL_CHAIN = 25
# In which function each backend of Keras reduces gradients.
_FUNCTIONS = {"tensorflow": "a tf.function", "torch": "a function", "jax": "a function of jax.jit"}


def measure(options: AllreduceOptions) -> None:
    """Run the benchmark on all ranks. The chief prints and writes the results."""
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
        on_device = [
            _measure_tensor(collectives, on_devices, nbytes, options.repetitions)
            for nbytes in sizes
        ]
        report.print(
            f"\nallreduce of one float32 tensor on {on_devices.device}, in a tf.function, sum"
        )
        _show_sizes(report, on_device)
        report.add(tensors=on_device)
    _measure_gradients(report, collectives, options.repetitions, options.max_bytes)
    report.finish(options.json)


def array_sizes(max_bytes: int) -> list[int]:
    """Return the sizes of the arrays in bytes: 4, 16, 64 and so on, up to ``max_bytes``."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * FACTOR <= max_bytes:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


def _measure_array(collectives: Engine, nbytes: int, repetitions: int) -> dict[str, Any]:
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
    collectives: Engine, on_devices: DeviceCollectives, nbytes: int, repetitions: int
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

    # Reading the first element waits for the operation.
    return _compare(
        collectives,
        on_devices.hint,
        nbytes,
        lambda: copy().numpy(),
        lambda: reduce().numpy(),
        repetitions,
    )


def _compare(
    collectives: Engine,
    engine: str,
    nbytes: int,
    copy: Callable[[], Any],
    allreduce: Callable[[], Any],
    repetitions: int,
) -> dict[str, Any]:
    timings = time_in_turn(
        collectives,
        {"copy": copy, "allreduce": allreduce},
        repetitions=repetitions,
        calls=max(1, min(MAX_CALLS, BYTES_PER_MEASUREMENT // nbytes)),
    )
    best_s = timings["allreduce"].best_s
    return {
        "bytes": nbytes,
        "engine": engine,
        "best_s": best_s,
        "median_s": timings["allreduce"].median_s,
        "algorithm_bandwidth": nbytes / best_s,
        "bus_bandwidth": bus_bandwidth(nbytes, best_s, collectives.size),
        "copy_best_s": timings["copy"].best_s,
        "copy_median_s": timings["copy"].median_s,
        "copy_bandwidth": nbytes / timings["copy"].best_s,
    }


def _show_sizes(report: BenchReport, rows: list[dict[str, Any]]) -> None:
    head = ["engine", "bytes", "best", "median", "algbw", "busbw", "copy best", "copy bw", "ratio"]
    cells = [
        [
            row["engine"],
            str(row["bytes"]),
            format_seconds(row["best_s"]),
            format_seconds(row["median_s"]),
            *(f"{row[name] / 1e9:.2f} GB/s" for name in ("algorithm_bandwidth", "bus_bandwidth")),
            format_seconds(row["copy_best_s"]),
            f"{row['copy_bandwidth'] / 1e9:.2f} GB/s",
            f"{row['best_s'] / row['copy_best_s']:.2f}",
        ]
        for row in rows
    ]
    report.print_table(head, cells)
    report.print(
        "algbw: bytes / best time; busbw: algbw * 2 (n - 1) / n for n ranks\n"
        "copy: all ranks copy the same number of bytes in memory at the same time\n"
        "ratio: best / copy best"
    )


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 160 trainable variables without biases, 102 MB."""
    model = keras.applications.ResNet50(weights=None)
    return [tuple(v.shape) for v in model.trainable_variables if not v.path.endswith("bias")]


def _measure_gradients(
    report: BenchReport, collectives: Engine, repetitions: int, max_bytes: int
) -> None:
    """Time reductions of gradients, and of 4 bytes, in a compiled function."""
    reducer = GradientReducer.of_job()
    arrays = [np.ones(shape, np.float32) for shape in _shapes_within(max_bytes)]
    flat = np.ones(sum(array.size for array in arrays), np.float32)
    target = np.empty_like(flat)
    operations = {
        "copy": lambda: np.copyto(target, flat),
        "gradients": _averaging(reducer, arrays),
    }
    timings = time_in_turn(collectives, operations, repetitions=repetitions)
    gradients, copy = timings["gradients"], timings["copy"]
    operations = {"chain": _small(reducer, SMALL_CHAIN), "call": _small(reducer, 1)}
    timings = time_in_turn(collectives, operations, repetitions=repetitions, calls=SMALL_CALLS)
    small, small_call = timings["chain"].divided(SMALL_CHAIN), timings["call"]

    size = f"{len(arrays)} gradients of {flat.nbytes / 1e6:.3g} MB"
    pairs = zip(dataclasses.astuple(gradients), dataclasses.astuple(copy))
    rows = [
        [f"{size}, average", *_times(gradients)],
        ["copy of the same bytes", *_times(copy)],
        ["ratio", *(f"{value / unit:.2f}" for value, unit in pairs)],
        [f"4 bytes, one of {SMALL_CHAIN} consecutive", *_times(small)],
        ["4 bytes, with the call of the function", *_times(small_call)],
    ]
    where = _FUNCTIONS[keras.backend.backend()]
    report.print(f"\ninside {where}, including packing")
    report.print_table(["", "best", "median", "processor"], rows)
    parts = {"gradients": gradients, "copy": copy, "small": small, "small_call": small_call}
    each = {name: dataclasses.asdict(timing) for name, timing in parts.items()}
    report.add(gradients={"count": len(arrays), "nbytes": flat.nbytes, **each})
    ratio = gradients.best_s / copy.best_s
    report.compare(f"{size} / copy, best", ratio, "at most", MAX_TIMES_COPY, "times")
    what = f"allreduce of 4 bytes in {where}, best"
    report.compare(what, small.best_s * 1e6, "at most", MAX_SMALL_S * 1e6, "us")


def _averaging(reducer: GradientReducer, arrays: list[np.ndarray]) -> Callable[[], Any]:
    names = [f"gradient {index}" for index in range(len(arrays))]
    return _compiled(lambda *gradients: reducer.average(gradients, names), arrays)


def _small(reducer: GradientReducer, reductions: int) -> Callable[[], Any]:
    def reduce(value: Any) -> list[Any]:
        for _ in range(reductions):
            value = reducer.reduce(value, "average", "hvdtrain bench")
        return [value]

    return _compiled(reduce, [np.ones((), np.float32)])


def _compiled(function: Callable[..., Any], arrays: list[np.ndarray]) -> Callable[[], Any]:
    """Return a call of a function with tensors, which is compiled as in Keras' training step.

    The function must return a list of tensors. The call waits for its results.
    """
    backend = keras.backend.backend()
    with keras.device("cpu:0"):
        tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
    if backend == "tensorflow":
        import tensorflow as tf

        function = tf.function(function)
    elif backend == "jax":
        import jax

        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*tensors))
    return lambda: function(*tensors)


def _shapes_within(max_bytes: int) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    total = 0
    for shape in resnet50_shapes():
        nbytes = 4 * math.prod(shape)
        if total + nbytes <= max_bytes:
            kept.append(shape)
            total += nbytes
    return kept or [(1,)]


def _times(timing: Timing) -> list[str]:
    return [format_seconds(value) for value in dataclasses.astuple(timing)]
