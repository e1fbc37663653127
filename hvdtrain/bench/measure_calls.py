"""The cost of one more call of ``fit``: short ones of a small model that has been traced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import hvdtrain
from hvdtrain.bench.models import build_model, synthetic_data
from hvdtrain.bench.results import BenchReport
from hvdtrain.bench.timing import largest
from hvdtrain.collectives import Collectives

__all__ = ["measure_calls"]

STEPS = 5
BATCH_SIZE = 64
CALLS = 10
# Beyond the same call of plain Keras.
MOST_OVERHEAD_S = 0.1


class _Batches(keras.utils.PyDataset):
    """Batches that are there already."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x) // BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return self._x[rows], self._y[rows]


# Each takes x and y to what ``fit`` is given.
_INPUTS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "arrays": lambda x, y: {"x": x, "y": y, "batch_size": BATCH_SIZE},
    "tf.data": lambda x, y: {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE),
    },
    "PyDataset": lambda x, y: {"x": _Batches(x, y)},
}


def measure_calls(report: BenchReport, collectives: Collectives) -> None:
    """Report, for each kind of input, the best of some calls: plain Keras, and all ranks."""
    rows, cells = [], []
    for name in _INPUTS:
        alone_s, together_s = _measure(name, collectives)
        overhead_s = together_s - alone_s
        rows.append({"input": name, "alone_s": alone_s, "together_s": together_s})
        times_s = (alone_s, together_s, overhead_s)
        cells.append([name, *(f"{1000 * each:.0f} ms" for each in times_s)])
        what = f"one more call of fit, {name}: beyond plain Keras"
        report.hold_against(what, overhead_s, "at most", MOST_OVERHEAD_S, "s")
    report.print()
    report.print_table(["one more fit", "plain Keras", "all ranks", "more"], cells)
    report.print(
        f"the best of {CALLS} calls of {STEPS} steps of a small model that has been traced, with\n"
        "as many samples a rank in both."
    )
    report.add(calls=rows)


def _measure(name: str, collectives: Collectives) -> list[float]:
    """Seconds on the slowest rank: of plain Keras, one rank after the other, then of all."""
    alone_s = float("inf")
    for rank in range(collectives.size):
        if rank == collectives.rank:
            alone_s = _best_call_s(build_model("small"), name, 1)
        collectives.barrier(name=f"hvdtrain bench: rank {rank} calls fit alone")
    model = hvdtrain.distribute(build_model("small"))
    return largest(collectives, alone_s, _best_call_s(model, name, collectives.size))


def _best_call_s(model: keras.Model, name: str, ranks: int) -> float:
    """The quickest of some calls, after the first two."""
    given = _INPUTS[name](*synthetic_data(model, STEPS * BATCH_SIZE * ranks))
    times = []
    for _ in range(CALLS + 2):
        begin_s = time.perf_counter()
        model.fit(**given, shuffle=False, verbose=0)
        times.append(time.perf_counter() - begin_s)
    return min(times[2:])
