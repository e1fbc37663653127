"""Reductions as a training step makes them: inside a tf.function, packing included."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.bench.timing import Timing, time_in_turn
from hvdtrain.collectives import Collectives
from hvdtrain.gradients.reducer import GradientReducer

__all__ = ["measure_gradients", "resnet50_shapes"]

MOST_TIMES_COPY = 3.0
MOST_SMALL_S = 200e-6
SMALL_CALLS = 20
# Reductions one after another in one graph, so that the call of the graph itself counts little.
SMALL_CHAIN = 25
# Blocks of each stage of ResNet-50 and the channels inside them.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
EXPANSION = 4


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 160 trainable variables of ResNet-50 without its last bias: 102 MB of float32.

    The architecture of He et al. (2015), "Deep Residual Learning for Image Recognition", with
    batch normalisation after each convolution.
    """
    shapes: list[tuple[int, ...]] = [*_convolution(7, 3, 64)]
    channels = 64
    for blocks, width in STAGES:
        for block in range(blocks):
            shapes += _convolution(1, channels, width)
            shapes += _convolution(3, width, width)
            shapes += _convolution(1, width, width * EXPANSION)
            if block == 0:
                shapes += _convolution(1, channels, width * EXPANSION)
            channels = width * EXPANSION
    return [*shapes, (channels, 1000)]


def measure_gradients(
    report: BenchReport, collectives: Collectives, repetitions: int, max_bytes: int
) -> None:
    """Time large and small reductions on all ranks; ``max_bytes`` leaves out shapes beyond it."""
    reducer = GradientReducer.of_job()
    arrays = [np.ones(shape, np.float32) for shape in _shapes_within(max_bytes)]
    flat = np.ones(sum(array.size for array in arrays), np.float32)
    target = np.empty_like(flat)
    operations = {
        "copy": lambda: np.copyto(target, flat),
        "gradients": _averaging(reducer, arrays),
    }
    found = time_in_turn(collectives, operations, repetitions=repetitions)
    gradients, copy = found["gradients"], found["copy"]
    operations = {"chain": _small(reducer, SMALL_CHAIN), "call": _small(reducer, 1)}
    found = time_in_turn(collectives, operations, repetitions=repetitions, calls=SMALL_CALLS)
    small, small_call = found["chain"].divided(SMALL_CHAIN), found["call"]

    size = f"{len(arrays)} gradients of {flat.nbytes / 1e6:.3g} MB"
    pairs = zip(dataclasses.astuple(gradients), dataclasses.astuple(copy))
    rows = [
        [f"{size}, average", *_times(gradients)],
        ["copy of the same bytes", *_times(copy)],
        ["ratio", *(f"{value / unit:.2f}" for value, unit in pairs)],
        [f"4 bytes, one of {SMALL_CHAIN} in a row", *_times(small)],
        ["4 bytes, with the call of the function", *_times(small_call)],
    ]
    report.print("\ninside a tf.function, packing and unpacking included")
    report.print_table(["", "best", "median", "processor"], rows)
    timings = {"gradients": gradients, "copy": copy, "small": small, "small_call": small_call}
    each = {name: dataclasses.asdict(timing) for name, timing in timings.items()}
    report.add(gradients={"count": len(arrays), "nbytes": flat.nbytes, **each})
    ratio = gradients.best_s / copy.best_s
    report.hold_against(f"{size} / copy, best", ratio, "at most", MOST_TIMES_COPY, "times")
    what = "allreduce of 4 bytes in a tf.function, best"
    report.hold_against(what, small.best_s * 1e6, "at most", MOST_SMALL_S * 1e6, "us")


def _averaging(reducer: GradientReducer, arrays: list[np.ndarray]) -> Callable[[], Any]:
    names = [f"gradient {index}" for index in range(len(arrays))]
    with tf.device("CPU:0"):
        gradients = [tf.constant(array) for array in arrays]

    @tf.function
    def average() -> tf.Tensor:
        averages = reducer.average(gradients, names)
        # The averages stay in the graph, as they do on their way to an optimizer.
        with tf.control_dependencies(averages):
            return tf.constant(0)

    return average


def _small(reducer: GradientReducer, reductions: int) -> Callable[[], Any]:
    with tf.device("CPU:0"):
        start = tf.constant(1.0)

    @tf.function
    def reduce() -> tf.Tensor:
        value = start
        for _ in range(reductions):
            value = reducer.reduce(value, "average", "hvdtrain bench")
        return value

    return reduce


def _shapes_within(max_bytes: int) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    total = 0
    for shape in resnet50_shapes():
        nbytes = 4 * math.prod(shape)
        if total + nbytes <= max_bytes:
            kept.append(shape)
            total += nbytes
    return kept or [(1,)]


def _convolution(size: int, inputs: int, outputs: int) -> list[tuple[int, ...]]:
    """A kernel without bias, and scale and offset of the normalisation after it."""
    return [(size, size, inputs, outputs), (outputs,), (outputs,)]


def _times(timing: Timing) -> list[str]:
    return [format_seconds(value) for value in dataclasses.astuple(timing)]
